package device

import (
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/errs"
	"gorgonia.org/leanattention/internal/ongpu"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// GPU is an open NVIDIA GPU, or several GPUs of one machine that were opened together. A GPU needs an installed driver and
// nothing else: no toolkit, no cgo.
//
// Attention runs on a GPU if its operands are there: leanattention.CachedAttention on a cache whose Device is the GPU, and
// leanattention.Attend and leanattention.Attention on operands that are each a [Tensor]. All work of a GPU value is done in
// the order in which it was asked for.
//
// The driver is loaded at the first call of [List] or [Open]. For that, a Linux program for amd64 or arm64 that imports this
// package needs glibc to start, also if it was built with CGO_ENABLED=0. The build tag nogpu leaves GPUs out: then the
// program needs nothing, and every call returns ErrNoDevice.
//
// A GPU may be used by several goroutines at once. Close it when it is no longer needed: nothing else gives its memory back
// before the process ends. A GPU is used by its pointer. The use of a copy is ErrState.
type GPU struct{ gpu ongpu.GPU }

// Internal is for the packages of this module.
func (g *GPU) Internal() *ongpu.GPU {
	if g == nil {
		return nil
	}
	return &g.gpu
}

// Info describes a GPU.
type Info struct {
	Ordinal     int    // the driver's number of the GPU, from 0: what [Open] takes
	Name        string // such as "NVIDIA H200"
	Capability  int    // compute capability, 10*major + minor: 90 is 9.0
	MemoryBytes int64  // all of the GPU's memory
	// MemoryBandwidth is clock times width of the memory, in bytes a second. Reading reaches some nine tenths of it.
	// MemoryBandwidth is 0 if the driver does not tell.
	MemoryBandwidth float64
}

func infoOf(i cuda.Info) Info {
	return Info{Ordinal: i.Ordinal, Name: i.Name, Capability: i.Capability, MemoryBytes: i.MemoryBytes,
		MemoryBandwidth: 2 * 1e3 * float64(i.MemoryClockKHz) * float64(i.MemoryBusBits) / 8} // two transfers a clock
}

// Memory is the state of a GPU's memory, in bytes.
type Memory struct {
	Free   int64 // for every process of the machine
	Total  int64 // that the driver can hand out
	Used   int64 // by buffers of this GPU value
	Pinned int64 // memory of the host that this GPU value holds for copies
}

// List describes the GPUs that the driver shows, in the order of their ordinals, those that are too old for [Open] included.
// List opens no GPU.
//
// Errors: ErrNoDevice if there is no driver, the driver is older than release 525 (CUDA 12.0), or the driver shows no GPU.
func List() ([]Info, error) {
	const op = "device.List"
	infos, err := ongpu.List(op)
	if err != nil {
		return nil, err
	}
	list := make([]Info, len(infos))
	for i, info := range infos {
		list[i] = infoOf(info)
	}
	return list, nil
}

// Open opens the GPUs of these ordinals as one GPU value. Open shares the primary context of each GPU with other code in
// the process uses CUDA. A GPU may be opened more than once; each value has to be closed.
//
// Several GPUs must reach each other's memory (NVLink, or PCIe between GPUs that can). Then:
//
//   - Tensors lie on the first GPU, unless they were made by [GPU.UploadSharded] or [GPU.UploadReplicated].
//   - A cache has some KV heads, or some pages of each sequence, on each GPU. Each GPU attends to its part.
//   - A linear layer whose weights are sharded is computed by all GPUs.
//   - A node whose inputs are on all GPUs is computed by all GPUs, each in its own order. The GPUs meet only at sums.
//   - Results differ from the results of one GPU by rounding alone, and have the same bits on every run.
//   - A tensor or cache of a GPU that was opened by another call of Open is elsewhere: its use is an error that names both.
//
// docs/devices.md has the details.
//
// Errors:
//
//   - ErrNoDevice: as for [List], an ordinal without a GPU, or a GPU below compute capability 8.0.
//   - ErrOutOfMemory: no memory for a context.
//   - ErrUnsupported: no ordinal, an ordinal given twice, or GPUs that do not reach each other.
func Open(ordinals ...int) (*GPU, error) {
	g := new(GPU)
	if err := ongpu.Open(&g.gpu, newTensor, "device.Open", ordinals...); err != nil {
		return nil, err
	}
	g.gpu.Public = g
	return g, nil
}

// Members describes each of the GPUs that were opened together, in the order of the ordinals given to [Open]. Members also
// describes a closed GPU.
func (g *GPU) Members() (all []Info) {
	if g.Internal().Check("") != nil {
		return nil
	}
	for _, m := range g.gpu.Members {
		all = append(all, infoOf(m.Dev.Info()))
	}
	return all
}

// String names the GPU as error texts do: "GPU 0 (NVIDIA H200)", or of several
// "GPU 0 (NVIDIA H200) with GPU 1 (NVIDIA H200)".
func (g *GPU) String() string { return g.Internal().String() }

// Memory returns the present state of the memory of some of the [GPU.Members], by their indices: the sum over these
// members. Without members it is the sum over all.
//
// Errors: ErrShape for an index outside of the members, ErrClosed.
func (g *GPU) Memory(members ...int) (sum Memory, err error) {
	const op = "GPU.Memory"
	if err := g.Internal().Check(op); err != nil {
		return Memory{}, err
	}
	if len(members) == 0 {
		for i := range g.gpu.Members {
			members = append(members, i)
		}
	}
	for _, i := range members {
		if i < 0 || i >= len(g.gpu.Members) {
			return Memory{}, errs.Errorf(op, errs.ErrShape, "member %d of %d", i, len(g.gpu.Members))
		}
		m, err := g.gpu.Members[i].Dev.Memory()
		if err != nil {
			return Memory{}, ongpu.Error(op, err)
		}
		sum = Memory{Free: sum.Free + m.Free, Total: sum.Total + m.Total, Used: sum.Used + m.Used, Pinned: sum.Pinned + m.Pinned}
	}
	return sum, nil
}

// Synchronize waits until all queued work of this GPU value is done, and returns the errors of that work. Only timing
// needs Synchronize: downloads wait by themselves. Errors: ErrClosed, ErrUnsupported within [GPU.Record].
func (g *GPU) Synchronize() error { return g.Internal().Synchronize() }

// Close waits for the GPU's work of this process and gives back everything that was made on the GPU, the memory of caches
// and tensors included: their use is ErrClosed from then on, and so is a second Close. Within [GPU.Record], Close is ErrState
// and does nothing.
func (g *GPU) Close() error { return g.Internal().Close() }

// NewTensor takes memory for a tensor, with arbitrary content. Errors: ErrDType, ErrShape, ErrOutOfMemory, ErrClosed.
func (g *GPU) NewTensor(t tensor.Dtype, shape ...int) (*Tensor, error) {
	return public(g.Internal().NewTensor(t, shape...))
}

// Upload copies a tensor to the GPU. Upload returns when x has been read; the copy itself is queued. Errors: ErrUnsupported
// for a tensor that is no *tensor.Dense that Go can read, ErrDType, ErrShape, ErrOutOfMemory, ErrClosed.
func (g *GPU) Upload(x tensor.Tensor) (*Tensor, error) { return public(g.Internal().Upload(x)) }

// UploadSharded copies a part of a tensor to each of several GPUs: the indices of axis are shared out to the [GPU.Members]
// evenly and in order. With a single GPU, UploadSharded is [GPU.Upload].
//
// Sharded tensors, and the weights of [GPU.UploadWeightSharded], are operands of
//
//   - leanattention.Attend and Attention: keys and values, by heads. q, the output and the log-sum-exp are whole, on the
//     first GPU.
//   - Linear and Linears of package nn: weights (out, in) by output features, on axis 0. The bias is whole or sharded, too.
//     Each GPU computes its columns of the output. The output is sharded on axis 1 if x is on all GPUs
//     ([GPU.UploadReplicated]), and else whole, on the first GPU.
//   - Linear of package nn: weights by input features, on axis 1. The result is the sum over all GPUs, and on all of them.
//   - leanattention.CachedAttention: queries, keys and values by heads, on axis 1. On a cache that is sharded by heads the
//     output is sharded, too. On a cache that is sharded by context all GPUs gather operands in float32, and the output is
//     on all GPUs.
//   - Download, Free, and CopyFrom from host memory.
//
// All else refuses a sharded tensor.
//
// Errors: as [GPU.Upload], and ErrShape for an axis that x does not have, or with fewer indices than GPUs.
func (g *GPU) UploadSharded(x tensor.Tensor, axis int) (*Tensor, error) {
	return public(g.Internal().UploadSharded(x, axis))
}

// UploadReplicated copies a whole tensor to each of several GPUs. With a single GPU, UploadReplicated is [GPU.Upload].
//
// Nodes whose inputs are all on each GPU, replicated or sharded, are computed by all GPUs at once. From replicated inputs
// each GPU makes the same result. The GPUs meet only in linear layers whose weights are sharded by input features. A node
// that takes no replicated tensor computes on the first GPU, and its result is on the first GPU alone.
//
// A replicated tensor can be downloaded, freed, and written by CopyFrom. Errors: as [GPU.Upload].
func (g *GPU) UploadReplicated(x tensor.Tensor) (*Tensor, error) {
	return public(g.Internal().UploadReplicated(x))
}

// UploadWeight copies a matrix of weights to the GPU, for package nn: the value of nn.Rounded or nn.Quantised, or a tensor as
// [GPU.Upload] does.
//
//   - Formats of 8 and fewer bits: all of nn.Quantised and nn.Rounded. UploadWeight brings elements into the order of the
//     kernels. Beyond rows that fill 16, the matrix on the GPU takes at most 1.12 times the memory of w. Elements of 5 and 6
//     bits become bytes: 1.65 times with Q5_0, Q5_1 and Q5_K, and 1.38 times with Q6_K.
//   - on is an input of nn.Linear, Linears, GatedLinear and Embedding. free gives the memory back, as [Tensor.Free] does.
//   - Several GPUs that were opened as one: the first GPU has the matrix.
//   - Errors: as Upload, and ErrUnsupported for another format.
func (g *GPU) UploadWeight(w G.Value) (on G.Value, free func() error, err error) {
	return g.uploadWeight("GPU.UploadWeight", w, ongpu.OnFirst)
}

// UploadWeightSharded copies a matrix of weights to several GPUs, as [GPU.UploadWeight] does to one. With axis 0, each GPU has
// some rows, and with axis 1 some columns. Numbers and scales do not change.
//
// Errors: as [GPU.UploadSharded]; also ErrUnsupported with axis 1, if the columns do not divide into whole blocks and groups, or w has an
// Order of columns.
func (g *GPU) UploadWeightSharded(w G.Value, axis int) (on G.Value, free func() error, err error) {
	const op = "GPU.UploadWeightSharded"
	if axis != ongpu.ByRows && axis != ongpu.ByColumns {
		return nil, nil, errs.Errorf(op, errs.ErrShape, "axis %d of a matrix", axis)
	}
	return g.uploadWeight(op, w, axis)
}

// UploadWeightReplicated copies a matrix of weights to each of several GPUs, as [GPU.UploadWeight] does to one.
func (g *GPU) UploadWeightReplicated(w G.Value) (on G.Value, free func() error, err error) {
	return g.uploadWeight("GPU.UploadWeightReplicated", w, ongpu.OnAll)
}

func (g *GPU) uploadWeight(op string, w G.Value, to int) (on G.Value, free func() error, err error) {
	on, d, err := g.Internal().UploadWeight(op, w, to)
	if err != nil {
		return nil, nil, err
	}
	return on, d.Free, nil
}
