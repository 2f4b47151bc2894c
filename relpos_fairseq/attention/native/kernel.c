/* Exact attention with positions on a CPU, in memory linear in the lengths: the library's functions (see call.h).
 *
 * A thread takes a head (in the forward pass: some of its blocks of queries) and packs its keys, values and tables
 * once.  It then forms the logits of one tile at a time, a block of queries beside a chunk of keys, which stays in its
 * second-level cache.  Threads share nothing that they write, and every sum has one order.
 */
#include <pthread.h>
#include <sys/mman.h>
#ifdef __SSE2__
#include <xmmintrin.h>
#endif

#include "backward.h"
#include "search.h"

/* A thread keeps its buffers between calls, so that the system need not map their pages again; large ones are freed,
 * since a call that needs them takes long anyway. */
#define KEPT_BYTES ((size_t)16 << 20)
#define PAGE_BYTES ((size_t)2 << 20)

static _Thread_local char *thread_buffer;
static _Thread_local size_t thread_buffer_size;

/* A thread that ends frees its buffers: a program may start a thread for each request. */
static pthread_key_t thread_key;
static pthread_once_t key_once = PTHREAD_ONCE_INIT;
static int frees_at_exit;

static void make_key(void) { frees_at_exit = !pthread_key_create(&thread_key, free); }

static void set_buffer(char *buffer, size_t size)
{
    thread_buffer = buffer;
    thread_buffer_size = buffer ? size : 0;
    pthread_once(&key_once, make_key);
    if (frees_at_exit)
        pthread_setspecific(thread_key, buffer);
}

/* Return `size` bytes for this thread, or NULL. */
static char *borrow_buffer(size_t size)
{
    if (size > thread_buffer_size) {
        free(thread_buffer);
        size = round_up(size, PAGE_BYTES);
        set_buffer(aligned_alloc(PAGE_BYTES, size), size);
#ifdef MADV_HUGEPAGE
        if (thread_buffer)
            madvise(thread_buffer, size, MADV_HUGEPAGE);
#endif
    }
#ifdef RELPOS_POISON /* for a test: nothing may depend on what a buffer held before */
    if (thread_buffer)
        memset(thread_buffer, 0xFF, size);
#endif
    return thread_buffer;
}

static void return_buffer(void)
{
    if (thread_buffer_size > KEPT_BYTES) {
        free(thread_buffer);
        set_buffer(NULL, 0);
    }
}

/* Subnormal numbers count as 0 while the kernel runs: probabilities of distant keys become subnormal, and a processor
 * takes a hundred times as long for them.  Return the mode before, which the caller has to restore. */
static unsigned flush_subnormals(void)
{
#ifdef __SSE2__
    unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040);
    return before;
#else
    return 0;
#endif
}

static void restore_mode(unsigned before)
{
#ifdef __SSE2__
    _mm_setcsr(before);
#else
    (void)before;
#endif
}

/* Evaluate each group of heads in `parts` parts; a part is some blocks of queries.  Return 1 if memory is lacking. */
static int run(const Call *call, int backward, int64_t parts)
{
    int64_t size = rows_per_group(call), groups = relpos_groups(call), failed = 0;
    int64_t chunk = call->heads >= 2 * call->threads ? groups : 1;
#pragma omp parallel num_threads(call->threads) reduction(+ : failed)
    {
        unsigned mode = flush_subnormals();
        Head group[GROUP_ROWS];
        Arena arena = {0};
        for (int pass = 0; pass < 2 && !failed; pass++) { /* count the bytes, then take them */
            for (int m = 0; m < size; m++)
                allocate_head(&arena, group, m, call, backward);
            if (pass == 0)
                arena = (Arena){.base = borrow_buffer(arena.used)};
            failed = !arena.base;
        }
#pragma omp for schedule(dynamic, chunk)
        for (int64_t item = 0; item < call->heads * groups * parts; item++) {
            if (failed)
                continue;
            /* Batch rows follow one another within a head: they share its tables, which are packed once. */
            int64_t part = item % parts, first = item / parts % groups * size;
            int64_t h = item / parts / groups;
            int members = (int)min_of(size, call->batch - first);
            for (int m = 0; m < members; m++)
                begin_head(group + m, (first + m) * call->heads + h);
            if (backward) {
                backward_heads(group, members);
                continue;
            }
            int64_t blocks = (call->tgt_len + group->block_queries - 1) / group->block_queries;
            for (int64_t i = blocks * part / parts; i < blocks * (part + 1) / parts; i++)
                forward_block(group, members, i * group->block_queries);
        }
        return_buffer();
        restore_mode(mode);
    }
    return failed > 0;
}

int relpos_forward(const Call *call)
{
    int64_t heads = call->batch * call->heads / rows_per_group(call), wanted = 4 * call->threads;
    int64_t blocks = (call->tgt_len + BLOCK_QUERIES - 1) / BLOCK_QUERIES;
    return run(call, 0, heads >= wanted ? 1 : min_of(blocks, (wanted + heads - 1) / heads));
}

int relpos_backward(const Call *call) { return run(call, 1, 1); }

/* Evaluate a step of decoding (step.h): write `out`.  Return 0, or 1 if memory for buffers is lacking. */
int relpos_step(const StepCall *call)
{
    real *memory = malloc(max_of(query_products_size(call), 1) * sizeof(real));
    if (!memory)
        return 1;
    QueryProducts products = query_products_in(call, memory);
    int failed = 0;
#pragma omp parallel num_threads(call->threads) reduction(+ : failed)
    {
        unsigned mode = flush_subnormals();
        real *scratch = (real *)borrow_buffer(step_buffers_size(call) * sizeof(real));
        StepBuffers buffers = step_buffers_in(call, scratch);
        int64_t done = 0;
        failed = !scratch;
#pragma omp for schedule(static)
        for (int64_t h = 0; h < call->heads; h++)
            multiply_queries(call, &products, h);
#pragma omp for schedule(static)
        for (int64_t pair = 0; pair < call->batch * call->heads; pair++) {
            if (failed)
                continue;
            int64_t h = pair % call->heads;
            /* The first pairs of a thread are one of each head: they form the head's shared bias. */
            if (done++ < shared_bias_heads(call) && has_shared_bias(call))
                form_shared_bias(call, h, shared_bias_of(call, &buffers, h));
            step_head(call, &products, pair / call->heads, h, &buffers);
        }
        return_buffer();
        restore_mode(mode);
    }
    free(memory);
    return failed > 0;
}

typedef void OfRows(const void *call, int64_t first, int64_t rows, real *space);

/* Let threads evaluate parts of a call's rows, each in `space` numbers of its own.  Return 1 if memory is lacking. */
static int each_part(OfRows *evaluate, const void *call, int64_t rows, int64_t threads, int64_t space)
{
    int failed = 0;
    int64_t parts = parts_of_rows(rows, threads);
#pragma omp parallel num_threads(threads) reduction(+ : failed)
    {
        unsigned mode = flush_subnormals();
        real *own = (real *)borrow_buffer(space * sizeof(real));
        failed = !own;
#pragma omp for schedule(static)
        for (int64_t part = 0; part < parts; part++) {
            int64_t first = first_of_part(rows, part, parts), last = first_of_part(rows, part + 1, parts);
            if (!failed && last > first)
                evaluate(call, first, last - first, own);
        }
        return_buffer();
        restore_mode(mode);
    }
    return failed > 0;
}

/* Find the candidates of each row of logits (candidates.h): write `log_probs` and `units`.  Return 0, or 1 if memory is
 * lacking. */
int relpos_candidates(const CandidatesCall *call)
{
    return each_part(candidates_of_rows, call, call->rows, call->threads, PACKED + CACHED_ROWS * CHUNK);
}

/* How many columns a panel has, in which a linear layer's weight is packed. */
int64_t relpos_panel(void) { return NR; }

/* How many inputs a linear layer in integers may have; 0: this machine has no instructions for them. */
int64_t relpos_most_integers(void)
{
#ifdef LEVELS
    return MOST_INPUTS;
#else
    return 0;
#endif
}

/* Evaluate a linear layer (layer.h): write `out`.  Threads take rows, or panels where there are few rows.  Return 0, or
 * 1 if memory is lacking. */
int relpos_linear(const LinearCall *call)
{
    const Linear *linear = &call->linear;
    int64_t by_rows = call->rows >= call->threads * MR, parts = call->threads, panels = panels_of(linear);
    int failed = 0;
#pragma omp parallel num_threads(call->threads) reduction(+ : failed)
    {
        real *packed = (real *)borrow_buffer(PACKED * sizeof(real));
        failed = !packed;
#pragma omp for schedule(static)
        for (int64_t part = 0; part < parts; part++) {
            int64_t from = by_rows ? first_of_part(call->rows, part, parts) : 0;
            int64_t to = by_rows ? first_of_part(call->rows, part + 1, parts) : call->rows;
            int64_t first = by_rows ? 0 : panels * part / parts, last = by_rows ? panels : panels * (part + 1) / parts;
            if (!failed)
                linear_rows(linear, first, last, call->x + from * call->row_stride, call->row_stride, to - from, NULL,
                            call->out + from * linear->outputs + first * NR, linear->outputs, SUM, packed);
        }
        return_buffer();
    }
    return failed > 0;
}

/* Evaluate what follows self-attention in a layer (layer.h): write `out`.  Return 0, or 1 if memory is lacking. */
int relpos_layer(const LayerCall *call)
{
    return each_part(layer_rows, call, call->rows, call->threads, layer_buffers_size(call));
}

/* Find the candidates of a step, of which `begun` was the first that was evaluated here.  Return 1 if memory is lacking. */
static int search_step(SearchCall *call, int64_t begun)
{
    real *x = call->x, *y = call->y;
    int64_t rows = rows_of_step(call);
    place_sources(call);
    embed_last(call, begun);
    for (int64_t i = 0; i < call->num_layers; i++) {
        LayerCall layer = call->layers[i];
        layer.rows = rows;
        layer.residual = x;
        layer.out = y;
        if (relpos_layer(&layer))
            return 1;
        y = x, x = layer.out;
    }
    if (call->final_norm.weight)
        normalize_rows(&call->final_norm, x, x, rows, call->channels);
    call->candidates.rows = rows;
    call->candidates.x = x;
    return relpos_candidates(&call->candidates);
}

/* Choose the hypotheses of one step whose candidates are there; or evaluate steps until all sentences have their
 * hypotheses, or up to `stop` (search.h). */
int relpos_search(SearchCall *call)
{
    int64_t begun = call->step;
    int state;
    if (!call->num_layers) {
        state = choose(call);
        call->step++;
        return state;
    }
    place_keys(call, begun);
    do {
        if (search_step(call, begun))
            return LACKS_MEMORY;
        state = choose(call);
        call->step++;
        place_keys(call, begun);
        advance(call);
    } while (state == GOES_ON && call->step < call->stop);
    return state;
}

int relpos_groups(const Call *call)
{
    int64_t size = rows_per_group(call);
    return (int)((call->batch + size - 1) / size);
}

/* The bytes of what a function is given, and of what that points to, which Python compares with its own. */
#define SIZE_OF(name, size) \
    int64_t relpos_##name##_size(void) { return size; }
SIZE_OF(forward, sizeof(Call))
SIZE_OF(backward, sizeof(Call))
SIZE_OF(groups, sizeof(Call))
SIZE_OF(step, sizeof(StepCall) + sizeof(StepTables))
SIZE_OF(candidates, sizeof(CandidatesCall))
SIZE_OF(linear, sizeof(LinearCall))
SIZE_OF(layer, sizeof(LayerCall))
SIZE_OF(search, sizeof(SearchCall))
