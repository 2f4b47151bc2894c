/* Attention with positions on a CPU, exact, in memory linear in its lengths: see call.h.
 *
 * A thread takes a head (forward: some blocks of its queries), packs keys, values and tables once,
 * and forms logits for a block of queries and a chunk of keys at a time, where they stay in its
 * second-level cache.  Nothing is shared between threads, and sums have one order.
 */
#include <sys/mman.h>
#ifdef __SSE2__
#include <xmmintrin.h>
#endif

#include "backward.h"
#include "forward.h"

/* Buffers outlive a call, so that their pages are not fetched anew; large ones do not. */
#define KEPT ((size_t)64 << 20)
#define PAGE ((size_t)2 << 20)

static _Thread_local char *kept;
static _Thread_local size_t kept_size;

static char *borrow(size_t size)
{
    if (size > kept_size) {
        free(kept);
        size = round_up(size, PAGE);
        kept = aligned_alloc(PAGE, size);
        kept_size = kept ? size : 0;
#ifdef MADV_HUGEPAGE
        if (kept)
            madvise(kept, size, MADV_HUGEPAGE);
#endif
    }
    return kept;
}

static void give_back(void)
{
    if (kept_size > KEPT) {
        free(kept);
        kept = NULL;
        kept_size = 0;
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

/* Run `parts` parts of each head; a part is some blocks of queries. */
static int run(const Call *call, int backward, int64_t parts)
{
    int64_t heads = call->batch * call->heads, failed = 0;
    int64_t chunk = call->heads >= 2 * call->threads ? call->batch : 1;
#pragma omp parallel num_threads(call->threads) reduction(+ : failed)
    {
        unsigned before = flush_small();
        Head head = {0};
        Arena arena = {0};
        room(&arena, &head, call, backward);
        arena = (Arena){.base = borrow(arena.used)};
        int64_t packed = -1;
        if (arena.base)
            room(&arena, &head, call, backward);
        else
            failed++;
#pragma omp for schedule(dynamic, chunk)
        for (int64_t item = 0; item < heads * parts; item++) {
            if (!arena.base)
                continue;
            /* Rows of the batch follow one another: they share tables, which are packed once. */
            int64_t part = item % parts, place = item / parts;
            int64_t n = place % call->batch * call->heads + place / call->batch;
            if (n != packed)
                begin_head(&head, n, packed);
            packed = n;
            if (backward) {
                backward_head(&head);
                continue;
            }
            int64_t blocks = (call->tgt + head.rows - 1) / head.rows;
            for (int64_t i = blocks * part / parts; i < blocks * (part + 1) / parts; i++)
                forward_block(&head, i * head.rows);
        }
        give_back();
        restore(before);
    }
    return failed > 0;
}

int relpos_forward(const Call *call)
{
    int64_t heads = call->batch * call->heads, wanted = 4 * call->threads;
    int64_t blocks = (call->tgt + BLOCK - 1) / BLOCK;
    return run(call, 0, heads >= wanted ? 1 : least(blocks, (wanted + heads - 1) / heads));
}

int relpos_backward(const Call *call) { return run(call, 1, 1); }

int64_t relpos_call_size(void) { return sizeof(Call); }
