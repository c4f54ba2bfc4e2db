package attention

import (
	"sync"
	"sync/atomic"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
)

// Engine has the attention kernels of one device. An Engine may be used by several goroutines at once.
type Engine struct {
	dev                           *cuda.Device
	uploads                       *cuda.Device // its streams copy plans
	info                          cuda.Info
	blocks                        int        // of each attention launch: one for each SM
	kernels                       []kernel   // lines of the table for this GPU
	loading                       sync.Mutex // held while functions of kernels are loaded
	append                        *cuda.Function
	gatherPrefixes, mergePrefixes *cuda.Function    // nil before first use
	rotary, appendNarrow          *cuda.Function    // nil before first use
	appendLatent, appendFour      *cuda.Function    // nil before first use
	spread                        [2]*cuda.Function // before and after attention; nil before first use
	closed                        atomic.Bool
	printed                       printed // kernels of variants

	Eager  bool // tests: use all thread blocks, although problems are small
	choice choice
	anyRow bool // tests: kernels for long launches of one row take short launches, too

	maps gpu.TensorMaps[mapKey]
}

// New loads the kernels that every plan needs. The first plan that needs another kernel loads it. Errors:
// [kernels.ErrNoImage] if the GPU has none, and the driver's.
func New(dev *cuda.Device) (*Engine, error) {
	e := &Engine{dev: dev, uploads: dev, info: dev.Info()}
	e.blocks = max(e.info.Multiprocessors, 1)
	e.kernels = kernelsOf(e.info.Capability)
	for i := range e.kernels {
		if k := &e.kernels[i]; k.unit == decodeUnit {
			if err := e.load(k); err != nil {
				return nil, err
			}
		}
	}
	m, err := gpu.Module(dev, appendUnit)
	if err != nil {
		return nil, err
	}
	if e.append, err = m.Function(appendEntry); err != nil {
		return nil, err
	}
	return e, nil
}

// UploadOn makes the Upload of plans take streams of another device, which can reach the engine's memory. The first
// device of a group uploads the plans of all. Call UploadOn before NewPlan.
func (e *Engine) UploadOn(dev *cuda.Device) { e.uploads = dev }

// load loads the functions of k, a kernel of the engine.
func (e *Engine) load(k *kernel) error {
	e.loading.Lock()
	defer e.loading.Unlock()
	if k.functions != nil {
		return nil
	}
	m, err := gpu.Module(e.dev, k.unit)
	if err != nil {
		return err
	}
	functions := make([]*cuda.Function, len(k.entries))
	for i, entry := range k.entries {
		if k.family.shared {
			functions[i], err = gpu.WithShared(m, entry)
		} else {
			functions[i], err = m.Function(entry)
		}
		if err != nil {
			return err
		}
	}
	k.functions = functions
	return nil
}

// find returns the first of the engine's kernels that takes w and fits into shared memory, or nil.
func (e *Engine) find(w *want) *kernel {
	for i := range e.kernels {
		if k := &e.kernels[i]; k.takes(w) && k.family.fits(e, k, w.problem.Dim, w.rows) {
			return k
		}
	}
	return nil
}

// Close ends the use of the engine and its plans. [Plan.Close] or closing the device frees the plans' memory. Closing
// the device unloads the kernels.
func (e *Engine) Close() error {
	if e.closed.Swap(true) {
		return gpu.Errorf("close", cuda.ErrClosed, "the engine")
	}
	return nil
}

// Device returns the engine's device.
func (e *Engine) Device() *cuda.Device { return e.dev }

// hasCopyEngine reports whether the GPU has tensor maps, with a copy engine that reads them, and overlapping launches.
func (e *Engine) hasCopyEngine() bool { return e.info.Capability >= 90 }

// hasEpilogue reports whether kernels have epilogue warps, which merge and store output tiles.
func (e *Engine) hasEpilogue() bool { return e.info.Capability == 90 }

// Supports returns nil if a kernel takes the problem. Errors wrap attn.ErrShape, attn.ErrDType and attn.ErrUnsupported.
func (e *Engine) Supports(asked *attn.Problem) error {
	const op = "supports"
	reduced := asked.Reduced()
	g := &reduced
	if err := supports(op, g, e.kernels); err != nil {
		return err
	}
	spread := spreadsIn(e.kernels, g)
	reduced = spread.problem(reduced)
	w := want{problem: g, features: g.Features(), rows: g.Group()}
	if g.Variant != nil {
		if err := e.printAll(op, g, e.findPrefill(g, mostPackedRows).taken(g, false), e.find(&w)); err != nil {
			return err
		}
	}
	_, err := e.kernel(op, &w)
	return err
}

// HasKernel is Supports without a GPU: whether all GPUs have a kernel. A GPU may still have too little shared memory.
func HasKernel(asked *attn.Problem) error {
	g := asked.Reduced()
	return supports("supports", &g, table)
}

// kernel returns the kernel that find returns, or an error that names the unsupported part of w.
func (e *Engine) kernel(op string, w *want) (*kernel, error) {
	g := w.problem
	if k := e.find(w); k != nil {
		if k.needs&attn.Varied != 0 {
			made, err := e.print(op, g, k)
			return made.kernel, err
		}
		return k, nil
	}
	if find(e.kernels, w) != nil {
		return nil, gpu.Errorf(op, attn.ErrShape, "%d rows of head dim %d, keys of %v: more than the GPU's %d bytes of shared memory can hold",
			min(w.rows, BlockRows), g.Dim, g.Pages.Planes[0].DType, e.info.SharedPerBlockMost)
	}
	return nil, refusal(op, w, e.kernels)
}

// mapKey identifies a tensor map.
type mapKey struct {
	address  uint64
	rows     int
	dim, box int
	row      columns
	whole    bool // a box is a chunk
	element  attn.DType
}

// tensorMap returns the tensor map of keys (or values) in m, for boxes of `box` rows. `row` says where their elements go.
func (e *Engine) tensorMap(m *gpu.Memory, s *shape, row columns, box int) (cuda.TensorMap, error) {
	key := mapKey{m.Address(), max(m.Len/int(row.dim), 1), s.dim, box, row, box == s.keys, s.element}
	return e.maps.Get(key, func() (cuda.TensorMap, error) {
		return e.dev.TensorMap(m.Buffer, m.Offset, s.tiles(row, key.rows, box))
	})
}
