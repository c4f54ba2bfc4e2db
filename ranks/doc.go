// Package ranks lets several processes, on one host or on many, compute one graph together. Each process has a part of the
// weights on its GPUs, and nn.AllReduce sums the partial results. Or each has all weights, and nn.AdamW.Ranks sums their gradients.
//
//	world, err := ranks.Environment()        // RANK, WORLD_SIZE, ... as torchrun sets them
//	gpu, err := world.OpenGPU()
//	comm, err := ranks.Join(ctx, gpu, world)
//	y, err := nn.Linear(x, wPart, nil)       // this rank's part of the sums
//	y, err = nn.AllReduce(y, comm)           // all of them, on every rank
//	...
//	defer comm.Close()                       // before the GPU
//
// NVIDIA's NCCL makes the sums: version 2.23 or newer must be installed. The rest of this module does not need NCCL. Ranks that join
// without a GPU sum in host memory, and need no NCCL. All ranks must run the same sums in the same order.
//
// A failure of one rank ends all ranks within seconds, with an error that names the rank: see [Comm.Err].
package ranks
