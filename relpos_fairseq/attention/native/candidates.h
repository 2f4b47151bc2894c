/* What beam search reads of the logits of a vocabulary: log-probabilities of its first units and of the best others.
 *
 *     log_probs = logits / temperature - log(sum(exp(logits / temperature)))
 *
 * A search takes a few of thousands of units, so that no other log-probability need be written.
 */
#ifndef RELPOS_CANDIDATES_H
#define RELPOS_CANDIDATES_H

#include "rowwise.h"

#define SUMMED 512  /* logits of which one sum is formed; a multiple of NR */
#define SEARCHED 32 /* logits among which one is looked for, if one of them is a candidate */

/* The arguments (native/candidates.py). */
typedef struct {
    const real *logits; /* (rows, vocabulary) */
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

/* log(sum(exp((x - top) / temperature))) */
static double log_of_sum(const real *x, int64_t count, real top, double temperature)
{
    real scale = (real)(1 / temperature);
    double sum = 0;
    for (int64_t from = 0; from < count; from += SUMMED) {
        int64_t to = min_of(from + SUMMED, count);
        vec sums = {0};
        for (int64_t j = from; j < to; j += NR) {
            vec pair[2];
            for (int i = 0; i < 2; i++) {
                int64_t left = to - j - i * VL;
                pair[i] = left >= VL ? *(const vec *)(x + j + i * VL)
                                     : rest_of(x + j + i * VL, max_of(left, 0), -(real)INFINITY);
                pair[i] = (pair[i] - top) * scale;
            }
            exponential(pair, 0);
            sums += pair[0] + pair[1];
        }
        sum += sum_of_lanes(sums);
    }
    return log(sum);
}

/* Whether one of SEARCHED logits is greater than `least`. */
static NOINLINE int has_greater(const real *x, real least)
{
    int found = 0;
    for (int64_t j = 0; j < SEARCHED; j++)
        found |= x[j] > least;
    return found;
}

static void candidates_of_row(const CandidatesCall *call, int64_t row)
{
    const real *x = call->logits + row * call->row_stride;
    int64_t width = call->first + call->best, held = 0;
    real *log_probs = call->log_probs + row * width, *best = log_probs + call->first;
    int64_t *units = call->units + row * width, *best_units = units + call->first;
    for (int64_t j = 0; j < call->first; j++) {
        log_probs[j] = x[j];
        units[j] = j;
    }
    for (int64_t from = call->first; from < call->vocabulary; from += SEARCHED) {
        int64_t to = min_of(from + SEARCHED, call->vocabulary);
        if (held == call->best && to - from == SEARCHED && !has_greater(x + from, best[held - 1]))
            continue;
        for (int64_t j = from; j < to; j++)
            if (held < call->best || x[j] > best[held - 1])
                held = insert(best, best_units, held, call->best, x[j], j);
    }
    real top = largest(log_probs, width, -(real)INFINITY);
    double sum = log_of_sum(x, call->vocabulary, top, call->temperature);
    for (int64_t j = 0; j < width; j++)
        log_probs[j] = (real)((log_probs[j] - top) / call->temperature - sum);
}

#endif
