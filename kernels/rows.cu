// Entry points of gradients that read and write each number once, and of moves and conversions by vectors.
//
// Needed by: training, and moves of nn.
#include "nodes_rows.cuh"

#define ROWS(name, blocks, Params, run) \
  extern "C" __global__ void __launch_bounds__(TRAINING_THREADS, blocks) name(const __grid_constant__ Params p) { run(p); }

ROWS(rows_sums, 4, RowsSumsParams, rowsSums)
ROWS(rows_round, 4, RowsRoundParams, rowsRound)
ROWS(rows_norm, 1, RowsNormParams, rowsNorm<false>)
ROWS(rows_norm_wide, 1, RowsNormParams, rowsNorm<true>) // of more than 1024 elements
ROWS(rows_layer_norm, 4, RowsLayerNormParams, rowsLayerNorm)
ROWS(rows_slopes, 4, TrainingSlopeParams, rowsSlopes)
ROWS(rows_convert, 4, TrainingConvertParams, rowsConvert)
ROWS(rows_widen_1, 4, RowsMoveParams, rowsWiden<1>)
ROWS(rows_widen_8, 4, RowsMoveParams, rowsWiden<8>)
ROWS(rows_move_2, 4, RowsMoveParams, rowsMove<u16>)
ROWS(rows_move_16, 4, RowsMoveParams, rowsMove<uint4>)
