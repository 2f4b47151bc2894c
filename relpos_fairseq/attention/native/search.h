/* Beam search of one sentence, which chooses what fairseq's does: its steps one after another where a decoder's layers
 * are given, or one step's choice among candidates that were found elsewhere.
 *
 * A step writes for each hypothesis which one it continues, with which unit and to which sum of log-probabilities; what
 * a hypothesis wrote before is found by going back.  Keys stay where they were written, in the row of that ancestor.
 */
#ifndef RELPOS_SEARCH_H
#define RELPOS_SEARCH_H

#include "candidates.h"

/* The arguments (native/search.py). */
typedef struct {
    /* Of the decoder; num_layers 0: `candidates` holds what one step found, and nothing else is read here. */
    CandidatesCall candidates; /* of `beam` rows, of which the first step reads one */
    LayerCall *layers;         /* (num_layers,) of a step; they are advanced in place */
    int64_t num_layers, channels;
    const real *embedding; /* (vocabulary, channels) */
    double embed_scale;
    const real *added; /* (stop - step, channels) what positions add to the embeddings, or NULL */
    Norm embedding_norm, final_norm; /* without a weight where there is none */
    real *x, *y;                     /* (beam, channels) */
    int64_t *places;                 /* (beam, places_stride) the row in which each key of a hypothesis lies */
    const int64_t *given_places;     /* (beam, step) those of the steps before */
    int64_t places_stride;
    /* Of the search */
    int64_t beam, begin, pad, unk, eos, min_len, max_len; /* `begin`: by which hypotheses begin */
    double unk_penalty;
    int64_t step, stop;       /* the coming step, and the one before which to return */
    int64_t *parents, *units; /* (max_len + 1, beam) which hypothesis each continues, and the unit */
    real *scores;             /* (max_len + 1, beam) sums of log-probabilities */
    real *best;               /* (2 beam,) and where these stand among the candidates: */
    int64_t *best_places;
    /* The result */
    int64_t ended;                         /* hypotheses that have ended, `beam` at most */
    int64_t *ended_lengths, *ended_tokens; /* (beam,), (beam, max_len + 1) */
    real *ended_scores;                    /* (beam, max_len + 1) sums of log-probabilities */
} SearchCall;

/* What relpos_search returns. */
enum { GOES_ON, IS_DONE, IS_STUCK, LACKS_MEMORY };

/* A hypothesis of `length` steps that stands in `row`: its units, and its sums of log-probabilities. */
static void go_back(const SearchCall *call, int64_t row, int64_t length, int64_t *units, real *scores)
{
    for (int64_t t = length - 1; t >= 0; t--) {
        int64_t at = t * call->beam + row;
        units[t] = call->units[at];
        scores[t] = call->scores[at];
        row = call->parents[at];
    }
}

/* The log-probability of a candidate as the search counts it. */
INLINE real counted(const SearchCall *call, int64_t unit, real log_prob)
{
    int is_end = unit == call->eos;
    int is_refused = log_prob != log_prob || unit == call->pad || (call->step >= call->max_len && !is_end) ||
                     (call->step < call->min_len && is_end);
    return is_refused ? -(real)INFINITY : unit == call->unk ? log_prob - (real)call->unk_penalty : log_prob;
}

/* Find the 2 beam best candidates of a step, in descending order. */
static void find_best(const SearchCall *call)
{
    const CandidatesCall *found = &call->candidates;
    int64_t width = found->first + found->best, most = 2 * call->beam, held = 0;
    for (int64_t row = 0; row < (call->step ? call->beam : 1); row++) {
        real before = call->step ? call->scores[(call->step - 1) * call->beam + row] : 0;
        for (int64_t at = row * width; at < (row + 1) * width; at++) {
            real score = before + counted(call, found->units[at], found->log_probs[at]);
            if (held < most || score > call->best[most - 1])
                held = insert(call->best, call->best_places, held, most, score, at);
        }
    }
}

/* Choose the hypotheses that go on after a step, and keep those that end with it. */
static int choose(SearchCall *call)
{
    int64_t width = call->candidates.first + call->candidates.best, active = 0, row = call->max_len + 1;
    int64_t ended = call->ended, step = call->step;
    find_best(call);
    for (int64_t c = 0; c < 2 * call->beam; c++) {
        int64_t unit = call->candidates.units[call->best_places[c]], parent = call->best_places[c] / width;
        if (unit == call->eos && call->best[c] != -(real)INFINITY) {
            if (c >= call->beam || call->ended == call->beam)
                continue;
            int64_t *units = call->ended_tokens + call->ended * row;
            real *scores = call->ended_scores + call->ended * row;
            go_back(call, parent, step, units, scores);
            units[step] = unit;
            scores[step] = call->best[c];
            call->ended_lengths[call->ended++] = step + 1;
        } else if (active < call->beam) {
            int64_t at = step * call->beam + active++;
            call->parents[at] = parent;
            call->units[at] = unit;
            call->scores[at] = call->best[c];
        }
    }
    if (call->ended == call->beam || (step == call->max_len && call->ended > ended))
        return IS_DONE;
    return step < call->max_len ? GOES_ON : IS_STUCK;
}

/* Say where the keys of the coming step's hypotheses lie, all of whose steps from `begun` on were evaluated here. */
static void place_keys(const SearchCall *call, int64_t begun)
{
    for (int64_t row = 0; row < call->beam; row++) {
        int64_t *places = call->places + row * call->places_stride, from = row;
        places[call->step] = row;
        for (int64_t t = call->step - 1; t >= begun; t--)
            places[t] = from = call->parents[t * call->beam + from];
        memcpy(places, call->given_places + from * begun, begun * sizeof *places);
    }
}

/* x (beam, channels) = the embeddings of the units that hypotheses ended with, with what positions add. */
static void embed_last(const SearchCall *call, int64_t begun)
{
    int64_t channels = call->channels;
    real scale = (real)call->embed_scale;
    const real *added = call->added ? call->added + (call->step - begun) * channels : NULL;
    for (int64_t row = 0; row < call->beam; row++) {
        real *x = call->x + row * channels;
        int64_t unit = call->step ? call->units[(call->step - 1) * call->beam + row] : call->begin;
        const real *embedding = call->embedding + unit * channels;
        for (int64_t c = 0; c < channels; c++)
            x[c] = embedding[c] * scale + (added ? added[c] : 0);
    }
    if (call->embedding_norm.weight)
        normalize_rows(&call->embedding_norm, call->x, call->x, call->beam, channels);
}

/* Let a step of self-attention read one key more, and turn it by its slot's angles. */
static void advance(const SearchCall *call)
{
    for (int64_t i = 0; i < call->num_layers; i++) {
        LayerCall *layer = call->layers + i;
        StepCall *step = (StepCall *)layer->attention;
        step->src_len++;
        step->query_factors.data += step->rank; /* the factors of a query stand by position */
        layer->turn += 2 * layer->pairs;
    }
}

#endif
