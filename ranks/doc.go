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
// A process with several GPUs can be several ranks. Each rank is a goroutine with a GPU, a graph, weights and a solver of its own:
//
//	gpu, err := device.Open(i)
//	comm, err := ranks.Join(ctx, gpu, ranks.World{Rank: i, Size: gpus, Address: "127.0.0.1:29500"})
//
// NVIDIA's NCCL makes the sums: version 2.23 or newer must be installed. The rest of this module does not need NCCL. Ranks that join
// without a GPU sum in host memory, and need no NCCL. All ranks must run the same sums in the same order.
//
// A failure of one rank ends all ranks within seconds, with an error that names the rank: see [Comm.Err].
package ranks
