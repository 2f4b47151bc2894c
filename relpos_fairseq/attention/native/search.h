/* Beam search, which chooses what fairseq's does: its steps one after another where a decoder's layers are given, or one
 * step's choice among candidates that were found elsewhere.
 *
 * A step writes for each hypothesis which one it continues, with which unit and to which sum of log-probabilities; what
 * a hypothesis wrote before is found by going back.  Keys stay where they were written, in the row of that ancestor.
 * Rows are those of the sentences that go on, one after another, `beam` of each; the first step has one row of each
 * where it is evaluated here.
 */
#ifndef RELPOS_SEARCH_H
#define RELPOS_SEARCH_H

#include "candidates.h"

/* The arguments (native/search.py). */
typedef struct {
    /* Of the decoder; num_layers 0: `candidates` holds what one step found, and nothing else is read here. */
    CandidatesCall candidates;
    LayerCall *layers; /* (num_layers,) of a step; they are advanced in place */
    int64_t num_layers, channels;
    const real *embedding; /* (vocabulary, channels) */
    double embed_scale;
    const real *added; /* (stop - step, channels) what positions add to the embeddings, or NULL */
    Norm embedding_norm, final_norm; /* without a weight where there is none */
    real *x, *y;                     /* (rows, channels) */
    int64_t *places;                 /* (rows, places_stride) the row in which each key of a hypothesis lies */
    const int64_t *given_places;     /* (rows, step) those of the steps before */
    int64_t places_stride;
    const int64_t *sources;     /* (sentences,) where the keys of each one's source lie, by its number; or NULL */
    int64_t *source_of_row;     /* (rows,) what attention to the source reads */
    const uint8_t *given_masks; /* (sources, source_length) 1 at hidden keys of a source, or NULL */
    uint8_t *masks;             /* (rows, source_length) what attention to the source reads */
    int64_t source_length;
    /* Of the search */
    int64_t beam, begin, pad, unk, eos, min_len, max_len; /* `begin`: by which hypotheses begin */
    double unk_penalty;
    int64_t step, stop;         /* the coming step, and the one before which to return */
    int64_t sentences, *active; /* how many sentences go on, and the number of each */
    int64_t of_each, rows;      /* rows of a sentence in the coming step, and `beam` of each sentence at the beginning */
    int64_t *parents, *units;   /* (max_len + 1, rows) which row each hypothesis continues, and the unit */
    real *scores;               /* (max_len + 1, rows) sums of log-probabilities */
    real *best;                 /* (2 beam,) and where these stand among the candidates: */
    int64_t *best_places;
    /* The result, by the number of a sentence */
    int64_t *ended;                        /* (sentences,) hypotheses that have ended, `beam` at most */
    int64_t *ended_lengths, *ended_tokens; /* (sentences, beam), (sentences, beam, max_len + 1) */
    int64_t *ended_rows;                   /* as the tokens: in which row of its step each was found */
    real *ended_scores;                    /* as the tokens: sums of log-probabilities */
} SearchCall;

/* What relpos_search returns. */
enum { GOES_ON, IS_DONE, IS_STUCK, LACKS_MEMORY };

/* A hypothesis of `length` steps that stands in `row`: its units, the rows that found them, and its sums. */
static void go_back(const SearchCall *call, int64_t row, int64_t length, int64_t *units, int64_t *rows, real *scores)
{
    for (int64_t t = length - 1; t >= 0; t--) {
        int64_t at = t * call->rows + row;
        units[t] = call->units[at];
        scores[t] = call->scores[at];
        rows[t] = row = call->parents[at];
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

/* Find the 2 beam best candidates of a sentence's rows, in descending order. */
static void find_best(const SearchCall *call, int64_t sentence)
{
    const CandidatesCall *found = &call->candidates;
    int64_t width = found->first + found->best, most = 2 * call->beam, held = 0, first = sentence * call->of_each;
    for (int64_t row = first; row < first + (call->step ? call->of_each : 1); row++) { /* at first, all are equal */
        real before = call->step ? call->scores[(call->step - 1) * call->rows + row] : 0;
        for (int64_t at = row * width; at < (row + 1) * width; at++) {
            real score = before + counted(call, found->units[at], found->log_probs[at]);
            if (held < most || score > call->best[most - 1])
                held = insert(call->best, call->best_places, held, most, score, at);
        }
    }
}

/* Choose the hypotheses of a sentence that go on after a step, in the rows from `to` on, and keep those that end with
 * it.  Return whether the sentence goes on. */
static int choose_of(SearchCall *call, int64_t sentence, int64_t to)
{
    int64_t width = call->candidates.first + call->candidates.best, step = call->step, has = 0;
    int64_t number = call->active[sentence], *ended = call->ended + number, before = *ended;
    find_best(call, sentence);
    for (int64_t c = 0; c < 2 * call->beam; c++) {
        int64_t unit = call->candidates.units[call->best_places[c]], parent = call->best_places[c] / width;
        if (unit == call->eos && call->best[c] != -(real)INFINITY) {
            if (c >= call->beam || *ended == call->beam)
                continue;
            int64_t of = number * call->beam + (*ended)++, at = of * (call->max_len + 1);
            go_back(call, parent, step, call->ended_tokens + at, call->ended_rows + at, call->ended_scores + at);
            call->ended_tokens[at + step] = unit;
            call->ended_rows[at + step] = parent;
            call->ended_scores[at + step] = call->best[c];
            call->ended_lengths[of] = step + 1;
        } else if (has < call->beam) {
            int64_t at = step * call->rows + to + has++;
            call->parents[at] = parent;
            call->units[at] = unit;
            call->scores[at] = call->best[c];
        }
    }
    return *ended < call->beam && (step < call->max_len || *ended == before);
}

/* Choose what goes on after a step. */
static int choose(SearchCall *call)
{
    int64_t go_on = 0;
    for (int64_t i = 0; i < call->sentences; i++)
        if (choose_of(call, i, go_on * call->beam))
            call->active[go_on++] = call->active[i];
    call->sentences = go_on;
    call->of_each = call->beam;
    return !go_on ? IS_DONE : call->step < call->max_len ? GOES_ON : IS_STUCK;
}

/* How many rows the coming step has. */
INLINE int64_t rows_of_step(const SearchCall *call) { return call->sentences * call->of_each; }

/* Say where the keys of the coming step's rows lie, all of whose steps from `begun` on were evaluated here. */
static void place_keys(const SearchCall *call, int64_t begun)
{
    for (int64_t row = 0; row < rows_of_step(call); row++) {
        int64_t *places = call->places + row * call->places_stride, from = row;
        places[call->step] = row;
        for (int64_t t = call->step - 1; t >= begun; t--)
            places[t] = from = call->parents[t * call->rows + from];
        memcpy(places, call->given_places + from * begun, begun * sizeof *places);
    }
}

/* Say which source each of the coming step's rows reads. */
static void place_sources(const SearchCall *call)
{
    int64_t length = call->source_length;
    for (int64_t row = 0; call->sources && row < rows_of_step(call); row++) {
        int64_t source = call->sources[call->active[row / call->of_each]];
        call->source_of_row[row] = source;
        if (call->given_masks)
            memcpy(call->masks + row * length, call->given_masks + source * length, length);
    }
}

/* x (rows, channels) = the embeddings of the units that hypotheses ended with, with what positions add. */
static void embed_last(const SearchCall *call, int64_t begun)
{
    int64_t channels = call->channels;
    real scale = (real)call->embed_scale;
    const real *added = call->added ? call->added + (call->step - begun) * channels : NULL;
    for (int64_t row = 0; row < rows_of_step(call); row++) {
        real *x = call->x + row * channels;
        int64_t unit = call->step ? call->units[(call->step - 1) * call->rows + row] : call->begin;
        const real *embedding = call->embedding + unit * channels;
        for (int64_t c = 0; c < channels; c++)
            x[c] = embedding[c] * scale + (added ? added[c] : 0);
    }
    if (call->embedding_norm.weight)
        normalize_rows(&call->embedding_norm, call->x, call->x, rows_of_step(call), channels);
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
