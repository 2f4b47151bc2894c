/* Attention with positions on a CPU, exact, in memory linear in its lengths: see call.h.
 *
 * A thread takes a head (forward: some blocks of its queries), packs keys, values and tables once,
 * and forms logits for a block of queries and a chunk of keys at a time, where they stay in its
 * second-level cache.  Nothing is shared between threads, and sums have one order.
 */
#include <pthread.h>
#include <sys/mman.h>
#ifdef __SSE2__
#include <xmmintrin.h>
#endif

#include "backward.h"
#include "forward.h"
#include "step.h"

/* Buffers outlive a call, so that their pages are not fetched anew; large ones do not. */
#define KEPT ((size_t)16 << 20) /* calls that want more last long */
#define PAGE ((size_t)2 << 20)

static _Thread_local char *kept;
static _Thread_local size_t kept_size;

/* A thread that ends frees its buffers: a program may make one for each request. */
static pthread_key_t of_thread;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static int is_freed;

static void make_key(void) { is_freed = !pthread_key_create(&of_thread, free); }

static void keep(char *buffers, size_t size)
{
    kept = buffers;
    kept_size = buffers ? size : 0;
    pthread_once(&once, make_key);
    if (is_freed)
        pthread_setspecific(of_thread, buffers);
}

static char *borrow(size_t size)
{
    if (size > kept_size) {
        free(kept);
        size = round_up(size, PAGE);
        keep(aligned_alloc(PAGE, size), size);
#ifdef MADV_HUGEPAGE
        if (kept)
            madvise(kept, size, MADV_HUGEPAGE);
#endif
    }
#ifdef RELPOS_POISON /* for a test: nothing may depend on what a buffer held before */
    if (kept)
        memset(kept, 0xFF, size);
#endif
    return kept;
}

static void give_back(void)
{
    if (kept_size > KEPT) {
        free(kept);
        keep(NULL, 0);
    }
}

/* Numbers too small for a full mantissa count as 0 while the kernel runs: probabilities of distant
 * keys come to be such, and a processor takes a hundred times as long for them. */
static unsigned flush_small(void)
{
#ifdef __SSE2__
    unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040);
    return before;
#else
    return 0;
#endif
}

static void restore(unsigned before)
{
#ifdef __SSE2__
    _mm_setcsr(before);
#else
    (void)before;
#endif
}

/* Run `parts` parts of each group of heads; a part is some blocks of queries. */
static int run(const Call *call, int backward, int64_t parts)
{
    int64_t size = group_of(call), groups = relpos_groups(call), failed = 0;
    int64_t chunk = call->heads >= 2 * call->threads ? groups : 1;
#pragma omp parallel num_threads(call->threads) reduction(+ : failed)
    {
        unsigned before = flush_small();
        Head group[GROUP];
        Arena arena = {0};
        for (int pass = 0; pass < 2 && !failed; pass++) { /* count, then take */
            for (int m = 0; m < size; m++)
                room(&arena, group, m, call, backward);
            if (pass == 0)
                arena = (Arena){.base = borrow(arena.used)};
            failed = !arena.base;
        }
#pragma omp for schedule(dynamic, chunk)
        for (int64_t item = 0; item < call->heads * groups * parts; item++) {
            if (failed)
                continue;
            /* Rows of the batch follow one another: they share tables, which are packed once. */
            int64_t part = item % parts, first = item / parts % groups * size;
            int64_t head = item / parts / groups;
            int members = (int)least(size, call->batch - first);
            for (int m = 0; m < members; m++)
                begin_head(group + m, (first + m) * call->heads + head);
            if (backward) {
                backward_heads(group, members);
                continue;
            }
            int64_t blocks = (call->tgt + group->rows - 1) / group->rows;
            for (int64_t i = blocks * part / parts; i < blocks * (part + 1) / parts; i++)
                forward_block(group, members, i * group->rows);
        }
        give_back();
        restore(before);
    }
    return failed > 0;
}

int relpos_forward(const Call *call)
{
    int64_t heads = call->batch * call->heads / group_of(call), wanted = 4 * call->threads;
    int64_t blocks = (call->tgt + BLOCK - 1) / BLOCK;
    return run(call, 0, heads >= wanted ? 1 : least(blocks, (wanted + heads - 1) / heads));
}

int relpos_backward(const Call *call) { return run(call, 1, 1); }

int relpos_step(const Step *c)
{
    real *of_queries = malloc(most(met_size(c), 1) * sizeof(real));
    if (!of_queries)
        return 1;
    Met met = met_of(c, of_queries);
    int failed = 0;
#pragma omp parallel num_threads(c->threads) reduction(+ : failed)
    {
        unsigned before = flush_small();
        real *memory = (real *)borrow(scratch_size(c) * sizeof(real));
        Scratch scratch = scratch_of(c, memory);
        int64_t done = 0;
        failed = !memory;
#pragma omp for schedule(static)
        for (int64_t head = 0; head < c->heads; head++)
            meet(c, &met, head);
        /* A thread's first pairs are one of each head. */
#pragma omp for schedule(static)
        for (int64_t pair = 0; pair < c->batch * c->heads; pair++) {
            if (failed)
                continue;
            int64_t head = pair % c->heads;
            if (done++ < heads_apart(c) && shares(c))
                share(c, head, shared_of(c, &scratch, head));
            step(c, &met, pair / c->heads, head, &scratch);
        }
        give_back();
        restore(before);
    }
    free(of_queries);
    return failed > 0;
}

int64_t relpos_step_size(void) { return sizeof(StepTables) + sizeof(Step); }

int64_t relpos_groups(const Call *call)
{
    int64_t size = group_of(call);
    return (call->batch + size - 1) / size;
}

int64_t relpos_call_size(void) { return sizeof(Call); }
