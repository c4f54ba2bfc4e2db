// Entry points of the loss and of the gradient of an embedding.
//
// Needed by: training: the loss of nn.CrossEntropy and gradients of nn.Embedding on a GPU.
#include "nodes_loss.cuh"

#define LOSS(name, Params, run) \
  extern "C" __global__ void __launch_bounds__(TRAINING_THREADS) name(const __grid_constant__ Params p) { run(p); }

LOSS(loss_row, LossParams, lossOfRow)
LOSS(loss_sums, LossSumsParams, lossSums)
LOSS(loss_table, TableGradientParams, tableGradient)
