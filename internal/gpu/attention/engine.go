package attention

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
)

// unit is the module with the kernels.
const unit = "lean"

// Engine is the kernels for attention on one device. It may be used by several
// goroutines at once.
type Engine struct {
	dev    *cuda.Device
	info   cuda.Info
	blocks int // of every launch of attention: one for each SM
	attend [attn.DTypes][len(headDims)]*cuda.Function
	many   [attn.DTypes]*cuda.Function                 // for output tiles of leastMany rows and more, of heads of manyDim; nil: there is none
	paged  [attn.DTypes][len(pagedDims)]*cuda.Function // for pages of a power of two of tokens, of heads of pagedDims; nil: there is none
	append *cuda.Function
	closed atomic.Bool

	Eager bool // all thread blocks are worth having: tests, whose problems are small

	unfused struct {
		sync.Mutex
		*unfused
	}
	prefill prefill

	maps gpu.TensorMaps[mapKey]
}

// New loads the kernels. Errors: [kernels.ErrNoImage] where there are none for
// this GPU, and the driver's.
func New(dev *cuda.Device) (*Engine, error) {
	e := &Engine{dev: dev, info: dev.Info()}
	e.blocks = max(e.info.Multiprocessors, 1)
	m, err := dev.Module(unit, func() ([]byte, error) { return gpu.Image(unit, e.info.Capability) })
	if err != nil {
		return nil, err
	}
	for _, i := range gpu.Types {
		for j, dim := range headDims {
			if e.attend[i][j], err = gpu.WithShared(m, &e.info, fmt.Sprintf("lean_%s_%d", gpu.Name(i), dim)); err != nil {
				return nil, err
			}
		}
		if i.Size() == 2 && e.finishes() {
			if e.many[i], err = gpu.WithShared(m, &e.info, fmt.Sprintf("lean_%s_%d_many", gpu.Name(i), manyDim)); err != nil {
				return nil, err
			}
			for j, dim := range pagedDims {
				if e.paged[i][j], err = gpu.WithShared(m, &e.info, fmt.Sprintf("lean_%s_%d_paged", gpu.Name(i), dim)); err != nil {
					return nil, err
				}
			}
		}
	}
	if e.append, err = m.Function("lean_append"); err != nil {
		return nil, err
	}
	return e, nil
}

// What the kernels for many rows are for (kernels/lean.cu, and HELPED in reduce.cuh).
const manyDim, leastMany = 128, 9

// What the kernels for pages are for.
var pagedDims = [...]int{64, 128}

// kernel is the one for output tiles of so many rows, and for keys of which a chunk lies in so
// many pages (see shape.pages).
func (e *Engine) kernel(s *shape, rows, pages int) *cuda.Function {
	if s.dim == manyDim && rows >= leastMany && e.many[s.element] != nil {
		return e.many[s.element]
	}
	if f := e.pagedKernel(s, pages); f != nil {
		return f
	}
	return e.attend[s.element][dimIndex(s.dim)]
}

// pagedKernel is the one for pages, or nil.
func (e *Engine) pagedKernel(s *shape, pages int) *cuda.Function {
	i := slices.Index(pagedDims[:], s.dim)
	if i < 0 || pages < 1 || pages > openingEntries {
		return nil
	}
	return e.paged[s.element][i]
}

// opens says whether there is a kernel for such pages.
func (e *Engine) opens(g *attn.Problem) bool {
	s := e.shape(g.KV, g.Dim)
	return e.pagedKernel(&s, s.pages(true, g.PageTokens)) != nil
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

// copies says whether the GPU has a copy engine that tensor maps are for, and
// launches that overlap.
func (e *Engine) copies() bool { return e.info.Capability >= 90 }

// finishes says whether warps of their own finish output tiles.
func (e *Engine) finishes() bool { return e.info.Capability == 90 }

// Supports says whether there is a kernel for a problem. Errors wrap attn.ErrShape,
// attn.ErrDType and attn.ErrUnsupported.
func (e *Engine) Supports(g *attn.Problem) error {
	if err := HasKernel(g); err != nil {
		return err
	}
	return e.fits("supports", g.KV, g.Dim, min(BlockRows, g.Heads/g.KVHeads))
}

// HasKernel is Supports where no GPU is known: one of them may have too little
// shared memory still.
func HasKernel(g *attn.Problem) error { return checkProblem("supports", g) }

// fits reports output tiles of so many rows that there is no shared memory for.
func (e *Engine) fits(op string, element attn.DType, dim, rows int) error {
	if _, ok := e.configure(e.shape(element, dim), rows); !ok {
		return gpu.Errorf(op, attn.ErrShape, "%d rows of head dim %d, keys of %v: more than the GPU's %d bytes of shared memory can hold",
			rows, dim, element, e.info.SharedPerBlockMost)
	}
	return nil
}

// checkProblem reports what is wrong with g, or has no kernel.
func checkProblem(op string, g *attn.Problem) error {
	if err := g.Check(op); err != nil {
		return err
	}
	if err := canAttend.Do(op, g); err != nil {
		return err
	}
	bad := func(format string, args ...any) error { return gpu.Errorf(op, attn.ErrUnsupported, format, args...) }
	switch {
	case dimIndex(g.Dim) < 0:
		return bad("head dim %d; there are kernels for %v", g.Dim, headDims)
	case g.Key != g.Value:
		return bad("key strides %+v, value strides %+v: they must be equal", g.Key, g.Value)
	case g.Key.Row != g.Dim:
		return bad("keys are %d elements apart; they must follow each other", g.Key.Row)
	case g.Key.Page%g.Dim != 0 || g.Key.Head%g.Dim != 0:
		return bad("key strides %+v are no multiples of the head dim %d", g.Key, g.Dim)
	case g.Key.Page/g.Dim >= mostKeyRows || g.Key.Head/g.Dim >= mostKeyRows || g.PageTokens >= mostKeyRows:
		return bad("key strides %+v, pages of %d tokens: there are kernels for less than %d rows of keys", g.Key, g.PageTokens, mostKeyRows)
	}
	for _, s := range [...]struct {
		name string
		attn.Strides
	}{{"query", g.Query}, {"output", g.Out}} {
		if s.Row%4 != 0 || s.Head%4 != 0 {
			return bad("%s strides %+v: they must be multiples of 4", s.name, s.Strides)
		}
	}
	return nil
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
