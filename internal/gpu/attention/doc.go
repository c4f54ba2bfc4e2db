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
// # What there are kernels for
//
// Head dims 64, 80, 96, 128 and 256, values as wide as keys, keys and values of
// float16, bfloat16 or float32 in pages whose rows follow each other, any number
// of heads, any group and any page size. Queries and outputs are of any of these
// types, and need not be of the keys'. Everything else, windows, soft caps,
// slopes and biases of scores included, is an error, before anything is queued.
// The output is the same, bit for bit, at every run of the same plan on the same
// kind of GPU.
//
// # Few rows and many
//
// Sequences of many query rows, as prompts have them, have kernels of their own (prefill.go), and a
// step that has both kinds of sequences may have both kinds of kernels: two launches, the second
// of which does not wait for the first, each on some of the multiprocessors. [Plan.Build] chooses by what
// each way costs (choice.go).
//
// # Order of launches
//
// From compute capability 9.0 on a launch starts while the one before it in the
// stream ends, and waits for that where it needs it. Run, after an Append of the
// same plan to the same keys and values, takes it that nothing writes the keys of
// earlier steps in the meantime: it starts to read them before it waits.
package attention
