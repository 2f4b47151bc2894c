/* The arguments of one attention call; `Call` in native/call.py mirrors the struct field by field.
 *
 * Fields are named after the fields of `PositionTerms` in Python.  The one exception is `static_`, since `static` is a
 * keyword of C.  The gradient of an operand is named after the operand, with a `d` before it.
 *
 * A head is one of the N = batch * heads pairs of batch row and head, numbered n = 0 .. N - 1.  The distance of query i
 * and key j is d = j - i, counted between their slots.  Two kinds of tables are read by distance:
 *
 *   - A table of scalars has one number for each of the `span` = tgt_len + src_len - 1 distances, lowest first.
 *   - A table of vectors has `width` rows, for the distances low .. low + width - 1.  Unless it is `unclipped`, smaller
 *     distances read its first row, and larger distances its last row.  These two rows are its clipped ends, "low end"
 *     and "high end" in comments; the distances between them are "near".
 *
 * The call evaluates
 *
 *     content = scale * content_q.content_k          (or scale * sum_c q_c k_c trilinear_d,c)
 *     logits  = content * gate_d * (q.product_query_d) (k.product_key_d) + scale * content_offset.k
 *               + scale * (q.query_vectors_d + k.key_vectors_d)
 *               + static_d + query_factors_i.key_factors_j
 *               + weight_i (past_i - past_j  for keys up to the query's slot,  future_j - future_i  for those after it)
 *     probs   = softmax over j of logits
 *     out_i   = sum_j probs_ij (v_j + value_vectors_d)
 *
 * where content_q stands for q, and content_k for k, unless the call gives others (rotated ones).  In the row and in
 * the column of the token at slot `first_token`, `reset` replaces the summands that `reset_replaces` names.  `decay` holds past, future and weight by
 * slot, and no reset replaces what they add.
 */
#ifndef RELPOS_CALL_H
#define RELPOS_CALL_H

#include <stdint.h>

#ifdef RELPOS_DOUBLE
typedef double real;
#else
typedef float real;
#endif

/* A tensor (B, H, length, channels).  Strides count elements, and are 0 where it is broadcast; channels
 * are contiguous. */
typedef struct {
    real *data; /* NULL: the call has no such tensor */
    int64_t batch_stride, head_stride, row_stride;
} Tensor;

/* A table (H|1, rows[, channels]) without gaps between rows; head_stride is 0 where all heads share one table. */
typedef struct {
    real *data; /* NULL: the call has no such table */
    int64_t head_stride;
} Table;

/* The summands of the logits that terms add to: query_vectors and key_vectors; static_; factors. */
enum { RESET_VECTORS = 1, RESET_SCALARS = 2, RESET_FACTORS = 4 };

typedef struct {
    int64_t batch, heads, tgt_len, src_len;
    int64_t dim, value_dim, rank;  /* channels of q and k; of v; of factors */
    int64_t query_start;           /* slot of the first query */
    int64_t first_head, all_heads; /* where a call evaluates some heads only: the first of them; how many there are */
    int64_t low, width, unclipped; /* of tables of vectors; unclipped is 1 where every distance has its own row */
    int64_t causal;                /* 1: a query sees no key after its own slot */
    int64_t window;                /* how many slots a query sees, the last of them its own; 0: all */
    int64_t reset_replaces;        /* the summands that the reset replaces, or 8 for none; 0: there is no reset */
    int64_t first_token_per_row;   /* 1: `first_token` has a slot for each row of the batch; 0: one slot for all */
    int64_t drop_threshold;        /* of 65536 probabilities, dropout drops this many */
    int64_t seed, threads;
    double scale;

    Tensor q, k, v, content_q, content_k;
    Tensor query_factors, key_factors; /* (B|1, H|1, tgt_len | src_len, rank) */
    Tensor decay;                      /* (B|1, H|1, 3, src_len) past, future and weight */
    Tensor out;
    Table content_offset;             /* (H|1, dim) */
    Table query_vectors, key_vectors; /* (H|1, width, dim) */
    Table product_query, product_key; /* (H|1, width, dim) */
    Table value_vectors;              /* (H|1, width, value_dim) */
    Table trilinear;                  /* (H|1, width, dim) */
    Table static_, gate;              /* (H|1, span) */
    Table reset;                      /* (H|1, 2) logits of the first token's row, and of its column */
    const int64_t *first_token;       /* (batch|1,) slot of the token that is reset, or NULL */
    const uint8_t *key_padding;       /* (batch, src_len) 1 at keys that are padding, or NULL */
    const int64_t *documents;         /* (batch, src_len) number of each slot's document, or NULL */
    real *row_max, *row_sum;          /* (N, tgt_len) largest logit of a query; sum of exp(logit - row_max) */

    /* Gradients.  The kernel writes every element of each.  A gradient that nobody wants, or whose operand is absent,
     * is NULL.  Where one tensor serves as two tables, both gradients have one address, and the kernel writes their
     * sum. */
    Tensor dout;                               /* an input: the gradient of `out` */
    Tensor dq, dk, dv, dcontent_q, dcontent_k; /* of the shapes of their operands */
    real *dquery_factors, *dkey_factors;       /* (relpos_groups() * heads, tgt_len | src_len, rank) */
    real *ddecay;                              /* (N, 3, src_len) */
    real *dcontent_offset;                     /* (N, dim) */
    real *dquery_vectors, *dkey_vectors;       /* (N, width, dim) */
    real *dproduct_query, *dproduct_key;       /* (N, width, dim) */
    real *dvalue_vectors;                      /* (N, width, value_dim) */
    real *dtrilinear;                          /* (N, width, dim) */
    real *dstatic, *dgate;                     /* (N, span) */
    real *dreset;                              /* (N, 2) */
} Call;

/* Write out, row_max and row_sum; or, from dout, the gradients.  Return 0, or 1 if memory for buffers is lacking. */
int relpos_forward(const Call *call);
int relpos_backward(const Call *call);

/* Return how many groups the batch rows form.  Up to GROUP_ROWS rows that share factors are one group, whose gradient
 * of factors is one sum; a row with factors of its own is a group alone. */
int relpos_groups(const Call *call);

#endif
