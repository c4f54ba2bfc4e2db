// Entry points of a solver's step.
//
// Needed by: training: steps of nn.AdamW and nn.SGD with weights on a GPU, sums of gradients, checkpoints.
#include "nodes_solver.cuh"

#define SOLVER(name, run) \
  extern "C" __global__ void __launch_bounds__(TRAINING_THREADS) name(const __grid_constant__ SolverParams p) { run(p); }

SOLVER(solver_add, solverAdd)
SOLVER(solver_squares, solverSquares)
SOLVER(solver_total, solverTotal)
SOLVER(solver_update, solverUpdate)
