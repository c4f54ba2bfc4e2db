// Package attention computes attention on a GPU: what package cpu does on the
// host, with the same vocabulary ([attn.Problem], [attn.Sequence]) and the same
// schedules (package lean), by the kernels of package kernels. It knows memory
// of a GPU and streams, and nothing of Gorgonia or of a decoder's other layers.
//
// # Calls
//
// An [Engine] is made once for a device. A [Plan] is the schedule of one step:
//
//	plan.Build(geometry, sequences, rows)      on the host
//	plan.Upload(stream)                        one copy
//	plan.Append(stream, k, v, newK, newV)      one launch, for caches: once a layer
//	plan.Run(stream, &Operands{...})           one launch, or two: once a layer
//
// Upload, Append and Run queue work and wait for nothing; they allocate nothing
// once a plan has grown to its size. A plan's work is for one stream, or for
// several whose order events make sure of: a plan has one workspace. Plans that
// run at the same time must be different ones.
//
// # Captured graphs
//
// Append and Run may be captured from a stream. The graph may then be launched
// again after a new Build and Upload, whatever the new lengths are, as long as
// [Plan.Generation] is what it was at the capture: block tables, lengths and
// schedule are data that the launches read. [Plan.Reserve] makes a plan large
// enough for all that is to come. Build, Upload and Reserve can't be captured.
//
// # Kernels
//
// The table of kernels (table.go) has three families: decode, prefill and unfused.
//
//   - Keys and values: float16, bfloat16 or float32, with head dims 64, 80, 96, 128 and 256, values as wide as keys, in
//     pages whose rows follow each other, of any size.
//   - Queries and outputs: any of these types, also another one than the keys'. Any number of heads and any group.
//   - Windows, sink tokens, trees, attention sinks, soft caps, ALiBi, biases and batch invariance: one Variant of the decode
//     and prefill kernels (scored.go), in which a launch chooses at run time. Plain attention has kernels without them.
//   - Everything else is an error before anything is queued.
//
// The output is the same, bit for bit, at every run of the same plan on the same kind of GPU.
//
// Prefill kernels (prefill.go) attend to sequences of many query rows. A step that has both kinds of sequences may
// have two launches: the prefill launch does not wait for the decode launch, and each has some of the multiprocessors.
// [Plan.Build] chooses by cost (choice.go).
//
// # A plan's table
//
// Kernels read lists of a plan: one table on the GPU, copied once a step. Each part of a plan (plan.go, prefill.go,
// scored.go, rotary.go, prefix.go) declares its lists and says how long these get; memory.go lays them out. A new number that a
// kernel reads is a list of its part, or a field of the part's parameters.
//
// # Order of launches
//
// From compute capability 9.0 on a launch starts while the one before it in the
// stream ends, and waits for that where it needs it. Run, after an Append of the
// same plan to the same keys and values, takes it that nothing writes the keys of
// earlier steps in the meantime: it starts to read them before it waits.
package attention
