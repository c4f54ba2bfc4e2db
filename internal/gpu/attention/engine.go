package attention

import (
	"sync"
	"sync/atomic"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
)

// Engine is the kernels for attention on one device. It may be used by several
// goroutines at once.
type Engine struct {
	dev                           *cuda.Device
	uploads                       *cuda.Device // whose streams bring plans there
	info                          cuda.Info
	blocks                        int        // of every launch of attention: one for each SM
	kernels                       []kernel   // the lines of the table that are for this GPU
	loading                       sync.Mutex // of their functions
	append                        *cuda.Function
	gatherPrefixes, mergePrefixes *cuda.Function // nil as long as no sequences shared prefixes
	rotary                        *cuda.Function // nil before it is first needed
	closed                        atomic.Bool

	Eager  bool // all thread blocks are worth having: tests, whose problems are small
	choice choice
	anyRow bool // kernels for long launches of one row take short ones, too: tests

	maps gpu.TensorMaps[mapKey]
}

// New loads the kernels that every plan needs; others are loaded by the first plan that needs
// them. Errors: [kernels.ErrNoImage] where there are none for this GPU, and the driver's.
func New(dev *cuda.Device) (*Engine, error) {
	e := &Engine{dev: dev, uploads: dev, info: dev.Info()}
	e.blocks = max(e.info.Multiprocessors, 1)
	m, err := gpu.Module(dev, decodeUnit)
	if err != nil {
		return nil, err
	}
	e.kernels = kernelsOf(e.info.Capability)
	for i := range e.kernels {
		if k := &e.kernels[i]; k.unit == decodeUnit {
			if err := e.load(k); err != nil {
				return nil, err
			}
		}
	}
	if e.append, err = m.Function(appendEntry); err != nil {
		return nil, err
	}
	return e, nil
}

// UploadOn has a plan's Upload take streams of another device, which reaches the engine's:
// the first of a group brings the plans of all. Call it before NewPlan.
func (e *Engine) UploadOn(dev *cuda.Device) { e.uploads = dev }

// load has the functions of a kernel, which is one of the engine's.
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
			functions[i], err = gpu.WithShared(m, &e.info, entry)
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

// find is the first of the engine's kernels that does what is wanted, and that there is shared
// memory for; nil: none does.
func (e *Engine) find(w *want) *kernel {
	for i := range e.kernels {
		if k := &e.kernels[i]; k.takes(w) && k.family.fits(e, k, w.problem.Dim, w.rows) {
			return k
		}
	}
	return nil
}

// Close ends the use of the engine and its plans. Their memory goes with
// [Plan.Close] or with the device, the kernels with the device.
func (e *Engine) Close() error {
	if e.closed.Swap(true) {
		return gpu.Errorf("close", cuda.ErrClosed, "the engine")
	}
	return nil
}

// Device is what the engine was made for.
func (e *Engine) Device() *cuda.Device { return e.dev }

// hasCopyEngine says whether the GPU has a copy engine that tensor maps are for, and
// launches that overlap.
func (e *Engine) hasCopyEngine() bool { return e.info.Capability >= 90 }

// hasEpilogue says whether there are epilogue warps, which merge and store output tiles.
func (e *Engine) hasEpilogue() bool { return e.info.Capability == 90 }

// Supports says whether there is a kernel for a problem. Errors wrap attn.ErrShape,
// attn.ErrDType and attn.ErrUnsupported.
func (e *Engine) Supports(g *attn.Problem) error {
	const op = "supports"
	if err := supports(op, g, e.kernels); err != nil {
		return err
	}
	_, err := e.kernel(op, &want{problem: g, features: g.Features(), rows: g.Group()})
	return err
}

// HasKernel is Supports where no GPU is known: one of them may have too little
// shared memory still.
func HasKernel(g *attn.Problem) error { return supports("supports", g, table) }

// kernel is what find finds, or the reason why there is none.
func (e *Engine) kernel(op string, w *want) (*kernel, error) {
	if k := e.find(w); k != nil {
		return k, nil
	}
	g := w.problem
	if find(e.kernels, w) != nil {
		return nil, gpu.Errorf(op, attn.ErrShape, "%d rows of head dim %d, keys of %v: more than the GPU's %d bytes of shared memory can hold",
			min(w.rows, BlockRows), g.Dim, g.Pages.Planes[0].DType, e.info.SharedPerBlockMost)
	}
	return nil, refusal(op, w, e.kernels)
}

// mapKey is all that a tensor map is made of.
type mapKey struct {
	address  uint64
	rows     int
	dim, box int
	whole    bool // a box is a chunk
	element  attn.DType
}

// tensorMap is the map of rows of keys (or values), for boxes of so many rows.
func (e *Engine) tensorMap(m *gpu.Memory, s *shape, box int) (cuda.TensorMap, error) {
	key := mapKey{m.Address(), max(m.Len/s.dim, 1), s.dim, box, box == s.keys, s.element}
	return e.maps.Get(key, func() (cuda.TensorMap, error) {
		return e.dev.TensorMap(m.Buffer, m.Offset, s.tiles(key.rows, box))
	})
}
