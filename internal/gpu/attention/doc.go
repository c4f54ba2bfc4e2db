// Package attention computes attention on a GPU. It shares the vocabulary ([attn.Problem], [attn.Sequence]) and the
// schedules (package lean) with the CPU engine, and launches the kernels of package kernels. It knows a GPU's memory
// and streams, and neither Gorgonia nor a decoder's other layers.
//
// # Calls
//
// An [Engine] is made once for a device. A [Plan] is the schedule of one step:
//
//	plan.Build(geometry, sequences, rows)      on the host
//	plan.Upload(stream)                        one copy
//	plan.Append(stream, pages, newK, newV)     one launch, for caches: once a layer
//	plan.Run(stream, &Operands{...})           one launch, or two: once a layer
//
// Upload, Append and Run queue work and do not wait. They allocate nothing once a plan has grown to its size. A plan
// has one workspace: its work goes to one stream, or to several streams that events order. Plans that run at the same
// time must be different plans.
//
// # Captured graphs
//
// Append and Run may be captured from a stream. The graph may be launched again after a new Build and Upload with any
// lengths, as long as [Plan.Generation] has not changed since the capture: block tables, lengths and schedule are data
// that the launches read. [Plan.Reserve] makes a plan large enough for later steps. Build, Upload and Reserve can't be
// captured.
//
// # Kernels
//
// The table of kernels (table.go) has three families: decode, prefill and unfused.
//
//   - Keys and values: float16, bfloat16 or float32, with head dims 64, 80, 96, 128 and 256. Pages may have any size. The
//     rows of a page follow each other. From 9.0 on, launches around attention (spread.go) add other multiples of 8, and
//     values of another width than keys.
//   - Queries and outputs: any of these types, which may differ from the keys' type. Any number of heads, any group size.
//   - Windows, sink tokens, trees, attention sinks, soft caps, ALiBi, biases and batch invariance: one Variant of the
//     decode and prefill kernels (scored.go). The launch chooses among them at run time. Plain attention has kernels
//     without them.
//   - Everything else is an error before anything is queued.
//
// The output is the same, bit for bit, on every run of the same plan on the same kind of GPU.
//
// Prefill kernels (prefill.go) attend to sequences of many query rows. A step with both kinds of sequences may have two
// launches. The prefill launch does not wait for the decode launch, and each uses some of the multiprocessors.
// [Plan.Build] chooses by cost (choice.go).
//
// # Gradients
//
// A [Backward] computes gradients (backward.go), without a plan: thread blocks take keys in the order of a ticket.
//
//   - Operands: float32, float16 or bfloat16, of one type; float32 without dropout. Head dims: multiples of 8 up to 128.
//   - Everything that forward kernels have but trees, batch invariance and variants; and dropout. Other features are errors.
//   - Attention with dropout has the same operands ([Backward.Forward]).
//
// # A plan's table
//
// Kernels read the lists of a plan from one table on the GPU, copied once a step. Each part of a plan (plan.go,
// prefill.go, scored.go, rotary.go, prefix.go) declares its lists and their lengths. memory.go lays the lists out. A
// new number for a kernel is a list of its part, or a field of the part's parameters.
//
// # Order of launches
//
// From compute capability 9.0 on, a launch starts while the previous launch of the stream ends, and waits for that
// launch only before it reads that launch's results. A Run after an Append of the same plan to the same keys and values
// reads the keys of earlier steps before it waits: nothing else may write these keys in the meantime.
package attention
