/* What beam search reads of the logits of a vocabulary: log-probabilities of its first units and of the best others.
 *
 *     log_probs = logits / temperature - log(sum(exp(logits / temperature)))
 *
 * A search takes a few of thousands of units, so that no other log-probability need be written; nor a logit, where they
 * are those of a linear layer: some rows' are formed chunk by chunk.
 */
#ifndef RELPOS_CANDIDATES_H
#define RELPOS_CANDIDATES_H

#include "layer.h"

#define CHUNK 256   /* logits that are read together; a multiple of NR and of SEARCHED */
#define SEARCHED 32 /* logits among which one is looked for, if one of them is a candidate */

/* The arguments (native/candidates.py). */
typedef struct {
    const real *x;      /* (rows, vocabulary) logits; or (rows, inputs) what `linear` forms them of */
    Linear linear;
    int64_t is_formed;  /* 0: x is the logits */
    int64_t rows, row_stride, vocabulary;
    int64_t first, best; /* how many first units a row of the result has, and how many of the best others */
    int64_t threads;
    double temperature;
    real *log_probs; /* (rows, first + best), contiguous; the best in descending order */
    int64_t *units;  /* (rows, first + best) the number of each in the vocabulary */
} CandidatesCall;

/* Put a logit among `held` ones in descending order, of which there may be `most`; return how many there are then.  An
 * equal one that came before stays before. */
INLINE int64_t insert(real *logits, int64_t *units, int64_t held, int64_t most, real logit, int64_t unit)
{
    int64_t place = held < most ? held : most - 1;
    for (; place > 0 && logits[place - 1] < logit; place--) {
        logits[place] = logits[place - 1];
        units[place] = units[place - 1];
    }
    logits[place] = logit;
    units[place] = unit;
    return min_of(held + 1, most);
}

/* sum(exp((x - top) / temperature)) */
static double sum_of_exponentials(const real *x, int64_t count, real top, double temperature)
{
    real scale = (real)(1 / temperature);
    vec sums = {0};
    for (int64_t j = 0; j < count; j += NR) {
        vec pair[2];
        for (int i = 0; i < 2; i++) {
            int64_t left = count - j - i * VL;
            pair[i] = left >= VL ? *(const vec *)(x + j + i * VL)
                                 : rest_of(x + j + i * VL, max_of(left, 0), -(real)INFINITY);
            pair[i] = (pair[i] - top) * scale;
        }
        exponential(pair, 0);
        sums += pair[0] + pair[1];
    }
    return sum_of_lanes(sums);
}

/* Whether one of SEARCHED logits is greater than `least`. */
static NOINLINE int has_greater(const real *x, real least)
{
    int found = 0;
    for (int64_t j = 0; j < SEARCHED; j++)
        found |= x[j] > least;
    return found;
}

/* What was read of a row. */
typedef struct {
    int64_t held; /* how many of the best others there are */
    real top;     /* the largest logit */
    double sum;   /* of exp((logit - top) / temperature) */
} RowRead;

/* Read the logits from .. to of a row, which stand at x. */
static void read_chunk(const CandidatesCall *call, int64_t row, RowRead *read, const real *x, int64_t from, int64_t to)
{
    int64_t width = call->first + call->best, held = read->held;
    real *log_probs = call->log_probs + row * width, *best = log_probs + call->first;
    int64_t *units = call->units + row * width, *best_units = units + call->first;
    for (int64_t j = from; j < min_of(call->first, to); j++) {
        log_probs[j] = x[j - from];
        units[j] = j;
    }
    for (int64_t at = max_of(from, call->first); at < to; at += SEARCHED) {
        int64_t end = min_of(at + SEARCHED, to);
        if (held == call->best && end - at == SEARCHED && !has_greater(x + at - from, best[held - 1]))
            continue;
        for (int64_t j = at; j < end; j++)
            if (held < call->best || x[j - from] > best[held - 1])
                held = insert(best, best_units, held, call->best, x[j - from], j);
    }
    real top = largest(x, to - from, read->top);
    if (top > read->top)
        read->sum *= exp((read->top - top) / call->temperature);
    if (top > -(real)INFINITY)
        read->sum += sum_of_exponentials(x, to - from, top, call->temperature);
    read->held = held;
    read->top = top;
}

/* The result of a row all of whose logits were read. */
static void end_row(const CandidatesCall *call, int64_t row, const RowRead *read)
{
    int64_t width = call->first + call->best;
    real *log_probs = call->log_probs + row * width;
    double sum = log(read->sum);
    for (int64_t j = 0; j < width; j++)
        log_probs[j] = (real)((log_probs[j] - read->top) / call->temperature - sum);
}

/* The candidates of CACHED_ROWS rows at most.  `space` has room for PACKED numbers, and for CHUNK logits of each. */
static void candidates_of_rows(const void *all, int64_t first, int64_t rows, real *space)
{
    const CandidatesCall *call = all;
    const Linear *linear = &call->linear;
    const real *x = call->x + first * call->row_stride;
    real *logits = space + PACKED;
    RowRead read[CACHED_ROWS];
    for (int64_t i = 0; i < rows; i++)
        read[i] = (RowRead){0, -(real)INFINITY, 0};
    for (int64_t from = 0; from < call->vocabulary; from += CHUNK) {
        int64_t to = min_of(from + CHUNK, call->vocabulary);
        if (call->is_formed)
            linear_rows(linear, from / NR, (to + NR - 1) / NR, x, call->row_stride, rows, NULL, logits, CHUNK, SUM,
                        space);
        for (int64_t i = 0; i < rows; i++)
            read_chunk(call, first + i, read + i,
                       call->is_formed ? logits + i * CHUNK : x + i * call->row_stride + from, from, to);
    }
    for (int64_t i = 0; i < rows; i++)
        end_row(call, first + i, read + i);
}

#endif
