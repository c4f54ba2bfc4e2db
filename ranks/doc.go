// Package ranks has several processes, on one host or on many, compute one graph together:
// each has its part of the weights on a GPU, or on several, and nn.AllReduce sums what they make.
//
//	world, err := ranks.Environment()        // RANK, WORLD_SIZE, ... as torchrun sets them
//	gpu, err := world.OpenGPU()
//	comm, err := ranks.Join(ctx, gpu, world)
//	y, err := nn.Linear(x, wPart, nil)       // this rank's part of the sums
//	y, err = nn.AllReduce(y, comm)           // all of them, on every rank
//	...
//	defer comm.Close()                       // before the GPU
//
// The sums are made by NVIDIA's NCCL, which has to be installed (2.23 or newer); nothing else
// of this module needs it. All ranks have to run the same sums in the same order.
//
// What goes wrong on one rank ends all of them within seconds, with an error that says whose
// it is: see [Comm.Err].
package ranks
