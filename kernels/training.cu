// Entry points of gradients of linear layers, norms and element-wise nodes.
//
// Needed by: training: gradients of nodes of nn on a GPU.
#include "nodes_training.cuh"

#define TRAINING(name, Params, run) \
  extern "C" __global__ void __launch_bounds__(TRAINING_THREADS, 2) name(const __grid_constant__ Params p) { run(p); }

TRAINING(training_product, TrainingParams, TrainingProduct<false>::run)
TRAINING(training_product_transposed, TrainingParams, TrainingProduct<true>::run)
TRAINING(training_transpose, TrainingTransposeParams, trainingTranspose)
TRAINING(training_sums, TrainingSumsParams, trainingSums)
TRAINING(training_slopes, TrainingSlopeParams, trainingSlopes)
TRAINING(training_norm, TrainingNormParams, trainingNorm)
TRAINING(training_convert, TrainingConvertParams, trainingConvert)
