package decoder

import (
	"errors"
	"fmt"
	"iter"
	"runtime"
	"slices"
	"strings"
	"sync"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/device"
	"gorgonia.org/leanattention/nn"
	"gorgonia.org/leanattention/ranks"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// Weights is a source of weights.
type Weights interface {
	// Tensor returns the tensor of a name and a shape, of float32, leanattention.Float16 or leanattention.BFloat16. The tensor
	// is not written, and must be valid as long as the engines that use it.
	Tensor(name string, shape ...int) (*tensor.Dense, error)
}

// placement is where an engine computes, and which part of the weights the engine has.
type placement struct {
	gpu   *device.GPU  // nil: the CPU
	world ranks.World  // the processes; a Size of 0 is one process
	as    tensor.Dtype // of matrices; the zero Dtype keeps the stored type

	context bool // GPUs share the cache by context: attention gathers queries, so GPUs may split heads
	tpla    bool // processes share latent vectors, and each has all heads
}

// weights yields the weights of a network, with the splits of this placement.
func (p *placement) weights(n Network) iter.Seq[Weight] {
	return func(yield func(Weight) bool) {
		for w := range n.Weights() {
			if p.tpla && w.latent {
				w.Split = Split{}
			}
			if !yield(w) {
				return
			}
		}
	}
}

// members returns the number of GPUs.
func (p *placement) members() int {
	if p.gpu == nil {
		return 1
	}
	return len(p.gpu.Members())
}

// mostSumming is the largest number of GPUs that add partial sums.
const mostSumming = 8

// check returns an error if a network has no part for each process. sums reports that several GPUs split the weights as
// [Split] says, and add partial sums. Otherwise GPUs split matrices by rows, and the first GPU has everything else. All
// processes have the same result.
func (p *placement) check(n Network) (sums bool, err error) { return p.checkOf(n, p.members()) }

// checkOf is check for a number of GPUs.
func (p *placement) checkOf(n Network, gpus int) (sums bool, err error) {
	size := max(p.world.Size, 1)
	split := false
	sums = gpus > 1 && gpus <= mostSumming
	for w := range p.weights(n) {
		if w.Split.Axis == Whole {
			continue
		}
		split = split || w.Split.Axis == ByColumns
		parts, along := w.Split.Parts, w.Shape[axisOf(w.Split)]
		if parts == 0 {
			continue
		}
		switch {
		case parts < 0 || along%parts != 0:
			return false, fmt.Errorf("decoder: weight %s of shape %v has %d parts: %w", w.Name, w.Shape, parts, ErrConfig)
		case parts < size:
			return false, fmt.Errorf("decoder: weight %s has %d parts, and there are %d ranks: use fewer: %w", w.Name, parts, size, ErrUnsupported)
		}
		for rank := range size {
			world := p.world
			world.Size, world.Rank = size, rank
			from, to := world.Part(parts)
			// Parts of rows begin at multiples of 16 bytes, also of 16-bit numbers.
			sums = sums && (p.context && w.up == nil || (to-from)%gpus == 0) && (to-from)*(along/parts)%(8*gpus) == 0
		}
	}
	if size > 1 && !split {
		return false, fmt.Errorf("decoder: %d ranks, and the network has no weights to split among them: use several GPUs of one process: %w", size, ErrUnsupported)
	}
	return sums && split, nil
}

func axisOf(s Split) int {
	if s.Axis == ByColumns {
		return 1
	}
	return 0
}

// cut returns the indices of the axis of a weight that the process has.
func (p *placement) cut(w *Weight) (from, to int) {
	along := w.Shape[axisOf(w.Split)]
	if p.world.Size <= 1 || w.Split.Axis == Whole || w.Split.Parts == 0 {
		return 0, along
	}
	from, to = p.world.Part(w.Split.Parts)
	each := along / w.Split.Parts
	return from * each, to * each
}

// put copies a weight to the GPUs.
func (p *placement) put(v G.Value, split Split, sums bool) (on G.Value, free func() error, err error) {
	switch {
	case p.members() == 1 || split.Axis == Whole && !sums:
		return p.gpu.UploadWeight(v)
	case split.Axis == Whole:
		return p.gpu.UploadWeightReplicated(v)
	case split.Axis == ByColumns && sums:
		return p.gpu.UploadWeightSharded(v, 1)
	case v.Shape()[0] < p.members():
		return p.gpu.UploadWeight(v)
	}
	return p.gpu.UploadWeightSharded(v, 0)
}

// load returns the values of all weights of a network, where the engine computes. Vectors are float32: they are a thousandth of
// a model, and are added to float32. free frees the memory of a GPU, and lets go of the files.
func load(n Network, from Weights, p placement, progress func(done int)) (weights map[string]G.Value, free func() error, err error) {
	weights = map[string]G.Value{}
	var there []func() error // frees the memory of GPUs
	held := func() error { return nil }
	release := func() (err error) {
		err = held()
		for _, free := range there {
			if e := free(); !errors.Is(e, la.ErrClosed) {
				err = errors.Join(err, e)
			}
		}
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, release())
		}
	}()
	sums, err := p.check(n)
	if err != nil {
		return nil, nil, err
	}
	if s, ok := from.(source); ok {
		if held, err = s.hold(); err != nil {
			held = func() error { return nil }
			return nil, nil, err
		}
		defer s.loaded()
	}
	loaded := map[string]string{} // weights by what they are
	for w := range p.weights(n) {
		if p.members() == 1 && (p.world.Size <= 1 || w.Split.Parts == 0) { // the split has no effect
			w.Split = Split{}
		}
		name, _ := w.tensor()
		same := fmt.Sprint(name, w.From.Row, w.Shape, w.Split)
		if other, ok := loaded[same]; ok {
			weights[w.Name] = weights[other]
		} else {
			loaded[same] = w.Name
			small, free, err := p.small(from, &w, sums)
			if err != nil {
				return nil, nil, fmt.Errorf("decoder: weight %s: %w", w.Name, err)
			}
			if free != nil {
				there = append(there, free)
			}
			weights[w.Name] = small
			if small == nil {
				t, err := p.load(from, &w)
				if err != nil {
					return nil, nil, err
				}
				weights[w.Name] = t
				if p.gpu != nil {
					split := w.Split
					if w.up != nil && !sums { // one GPU computes all layers by heads
						split = Split{}
					}
					up, free, err := p.put(t, split, sums)
					if err != nil {
						return nil, nil, fmt.Errorf("decoder: weight %s: %w", w.Name, err)
					}
					there = append(there, free)
					weights[w.Name] = up
				}
			}
		}
		if progress != nil {
			progress(len(weights))
		}
	}
	return weights, release, nil
}

// small returns a weight of fewer than 16 bits a number; nil: the weight has 16 or more. free, if not nil, frees the memory of a GPU.
// A weight of the files whose columns do not divide into whole blocks among GPUs or processes becomes float16.
func (p *placement) small(from Weights, w *Weight, sums bool) (v G.Value, free func() error, err error) {
	if v, err = p.smallOnHost(from, w); p.gpu == nil || v == nil || err != nil {
		return v, nil, err
	}
	on, free, err := p.put(v, w.Split, sums)
	if errors.Is(err, la.ErrUnsupported) && !roundedTo(p.as) {
		return nil, nil, nil
	}
	return on, free, err
}

// smallOnHost is small for host memory: the process's part.
func (p *placement) smallOnHost(from Weights, w *Weight) (G.Value, error) {
	if !w.matrix() {
		return nil, nil
	}
	first, rows, left, right := 0, w.Shape[0], 0, w.Shape[1]
	if begin, end := p.cut(w); w.Split.Axis == ByColumns {
		left, right = begin, end
	} else {
		first, rows = begin, end-begin
	}
	switch {
	case roundedTo(p.as):
		return nn.Rounded(p.as, rows, right-left, func(dst []float32, begin, end int) error {
			return p.numbers(dst, from, w, first+begin, first+end, left, right)
		})
	case p.as == tensor.Dtype{}:
		s, ok := from.(source)
		if !ok {
			return nil, nil
		}
		name, shape := w.tensor()
		q, err := s.blocks(name, shape, w.From.Row+first, w.From.Row+first+rows)
		if q == nil || err != nil {
			return nil, err
		}
		if q = quantisedColumns(q, left, right); q != nil {
			return q.Value()
		}
	}
	return nil, nil
}

// numbers reads columns [left, right) of rows of a weight.
func (p *placement) numbers(dst []float32, from Weights, w *Weight, begin, end, left, right int) error {
	wide, n := dst, right-left
	if n < w.Shape[1] {
		wide = make([]float32, (end-begin)*w.Shape[1])
	}
	if s, ok := from.(source); ok { // float32s decodes into wide
		name, shape := w.tensor()
		if err := s.float32s(wide, name, shape, w.From.Row+begin, w.From.Row+end); err != nil {
			return err
		}
	} else {
		t, err := part(from, w, tensor.Float32, begin, end-begin)
		if err == nil {
			t, err = converted(t, tensor.Float32)
		}
		if err != nil {
			return err
		}
		copy(wide, t.Float32s())
	}
	if n < w.Shape[1] {
		for row := range end - begin {
			copy(dst[row*n:][:n], wide[row*w.Shape[1]+left:])
		}
	}
	return nil
}

// quantisedColumns returns columns of a matrix; nil if the columns are not whole blocks and groups, or have an order. With all columns, the
// result is the matrix itself.
func quantisedColumns(q *nn.Quantised, left, right int) *nn.Quantised {
	n, block, group := right-left, blockElements(q.Format), max(q.Group, 1)
	switch {
	case n == q.Columns:
		return q
	case q.Order != nil || left%block != 0 || right%block != 0 || left%group != 0 || right%group != 0 && right < q.Columns:
		return nil
	}
	row := len(q.Data) / q.Rows
	of := func(columns int) int { return row / (q.Columns / block) * (columns / block) } // bytes
	part := &nn.Quantised{Format: q.Format, Rows: q.Rows, Columns: n, Data: fresh[byte](q.Rows * of(n)), Scales: q.Scales, Group: q.Group}
	each := len(q.Scales) / q.Rows
	if q.Group > 0 {
		part.Scales = nil
	}
	for r := range q.Rows {
		copy(part.Data[r*of(n):][:of(n)], q.Data[r*row+of(left):])
		if q.Group > 0 {
			part.Scales = append(part.Scales, q.Scales[r*each+left/q.Group:r*each+(right-1)/q.Group+1]...)
		}
	}
	return part
}

// blockElements returns the elements of a block of a format of nn.Quantised.
func blockElements(format string) (n int) {
	switch {
	case format == "e4m3":
		return 1
	case strings.HasSuffix(format, "_K"):
		return 256
	}
	if _, err := fmt.Sscanf(format, "int4_%d", &n); err != nil {
		return 32
	}
	return n
}

// roundedTo reports whether t is a type of fewer than 16 bits that [Options].Weights may have.
func roundedTo(t tensor.Dtype) bool { return t == tensor.Int8 || t == la.E4M3 || t == nn.Int4 }

// matrix reports whether a weight is a matrix whose rows are those of a tensor.
func (w *Weight) matrix() bool { return len(w.Shape) == 2 && w.up == nil }

// load returns the process's part of a weight, in host memory.
func (p *placement) load(from Weights, w *Weight) (*tensor.Dense, error) {
	to := p.as
	switch {
	case len(w.Shape) == 1:
		to = tensor.Float32
	case roundedTo(to): // not a matrix of the files: see small
		to = tensor.Dtype{}
	}
	first, rows := 0, w.Shape[0]
	begin, end := p.cut(w)
	if w.Split.Axis != ByColumns {
		first, rows = begin, end-begin
	}
	t, err := part(from, w, to, first, rows)
	if err != nil {
		return nil, err
	}
	if w.Split.Axis == ByColumns && end-begin < w.Shape[1] {
		if t, err = columns(t, begin, end); err != nil {
			return nil, fmt.Errorf("decoder: weight %s: %w", w.Name, err)
		}
	}
	if to == (tensor.Dtype{}) {
		to = t.Dtype()
	}
	if t, err = converted(t, to); err != nil {
		return nil, fmt.Errorf("decoder: weight %s: %w", w.Name, err)
	}
	return t, nil
}

// columns returns a copy of some columns of a matrix.
func columns(t *tensor.Dense, begin, end int) (*tensor.Dense, error) {
	all := t.Shape()[1]
	var data any
	switch x := t.Data().(type) {
	case []float32:
		data = columnsOf(x, all, begin, end)
	case []la.F16:
		data = columnsOf(x, all, begin, end)
	case []la.BF16:
		data = columnsOf(x, all, begin, end)
	default:
		return nil, fmt.Errorf("elements of %v: %w", t.Dtype(), ErrUnsupported)
	}
	return tensor.New(tensor.WithShape(t.Shape()[0], end-begin), tensor.WithBacking(data)), nil
}

func columnsOf[T any](x []T, all, begin, end int) []T {
	y := make([]T, 0, len(x)/all*(end-begin))
	for at := 0; at < len(x); at += all {
		y = append(y, x[at+begin:at+end]...)
	}
	return y
}

// widener is a source of weights that decodes rows into any type. The zero Dtype is the type that Tensor returns.
type widener interface {
	rowsAs(name string, as tensor.Dtype, shape []int, from, to int) (*tensor.Dense, error)
}

// part returns some rows of a weight, which may be rows of a larger tensor. A source that decodes returns the type as.
func part(from Weights, w *Weight, as tensor.Dtype, first, rows int) (t *tensor.Dense, err error) {
	if w.up != nil {
		return w.up.part(from, w, as, first, rows)
	}
	name, shape := w.tensor()
	begin, end := w.From.Row+first, w.From.Row+first+rows
	if f, ok := from.(widener); ok {
		return f.rowsAs(name, as, shape, begin, end)
	}
	if t, err = from.Tensor(name, shape...); err != nil {
		return nil, err
	}
	switch {
	case t == nil:
		return nil, fmt.Errorf("decoder: weight %s: Weights.Tensor returned no tensor: %w", w.Name, ErrConfig)
	case !slices.Equal(t.Shape(), shape):
		return nil, fmt.Errorf("decoder: weight %s: Weights.Tensor returned a tensor of shape %v, not %v: %w", w.Name, t.Shape(), tensor.Shape(shape), ErrConfig)
	}
	switch t.Dtype() {
	case tensor.Float32, la.Float16, la.BFloat16:
	default:
		return nil, fmt.Errorf("decoder: weight %s has elements of %v; known are float32, leanattention.Float16 and leanattention.BFloat16: %w", w.Name, t.Dtype(), ErrUnsupported)
	}
	if rows == shape[0] {
		return t, nil
	}
	row := t.Shape().TotalSize() / shape[0]
	data := slice(t.Data(), begin*row, end*row)
	shape = slices.Clone(w.Shape)
	shape[0] = rows
	return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(data)), nil
}

// slice returns some of a tensor's numbers; nil: of a type that weights do not have.
func slice(data any, from, end int) any {
	switch data := data.(type) {
	case []float32:
		return data[from:end]
	case []la.F16:
		return data[from:end]
	case []la.BF16:
		return data[from:end]
	}
	return nil
}

// converted returns t in another type, or t itself if it has that type. A finite number that the type does not have is an error.
func converted(t *tensor.Dense, to tensor.Dtype) (*tensor.Dense, error) {
	if t.Dtype() == to {
		return t, nil
	}
	if slice(t.Data(), 0, 0) == nil {
		return nil, fmt.Errorf("elements of %v: %w", t.Dtype(), ErrUnsupported)
	}
	into, err := rowsOf(to, t.Shape(), 0, t.Shape()[0])
	if err != nil {
		return nil, err
	}
	var mu sync.Mutex
	each(t.Shape().TotalSize(), func(from, end int) {
		if e := convert(into.Data(), from, slice(t.Data(), from, end)); e != nil {
			mu.Lock()
			defer mu.Unlock()
			err = e
		}
	})
	if err != nil {
		return nil, err
	}
	return into, nil
}

// each calls f for parts of n elements, on all processors.
func each(n int, f func(from, end int)) {
	const least = 1 << 16
	parts := min(runtime.GOMAXPROCS(0), max(1, n/least))
	var wait sync.WaitGroup
	for i := range parts {
		wait.Add(1)
		go func() {
			defer wait.Done()
			f(i*n/parts, (i+1)*n/parts)
		}()
	}
	wait.Wait()
}
