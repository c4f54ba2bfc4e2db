package leanattention

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/kvstore"
	"gorgonia.org/leanattention/internal/ongpu"
	"gorgonia.org/leanattention/internal/operand"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	cpuattention "gorgonia.org/leanattention/internal/cpu/attention"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu/attention"
	"gorgonia.org/leanattention/internal/gpu/layers"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/lean"
)

// UseEagerEngine makes GPUs that are opened from now on choose kernels for small steps as others do for large ones.
func UseEagerEngine(t testing.TB) {
	real := ongpu.NewAttentionEngine
	ongpu.NewAttentionEngine = func(dev, uploads *cuda.Device) (ongpu.AttentionEngine, error) {
		e, err := real(dev, uploads)
		if err != nil {
			return nil, err
		}
		e.(ongpu.Planner).Eager = true
		return e, nil
	}
	t.Cleanup(func() { ongpu.NewAttentionEngine = real })
}

// fakeExchange is that of GPUs with fake engines. The first member, which is the last to be told, does what all do.
type fakeExchange struct{ gpu *ongpu.GPU }

func (x *fakeExchange) Failed() error { return nil }

func (x *fakeExchange) Realign(func() error) error { return nil }

func (x *fakeExchange) note(s *cuda.Stream, member int, what string) error {
	e := fakeOf(x.gpu.Members[member])
	e.mu.Lock()
	defer e.mu.Unlock()
	e.calls = append(e.calls, what)
	_, err := s.Done()
	return err
}

func (x *fakeExchange) AllGathers(s *cuda.Stream, lists []*layers.AllGather, member int) error {
	if err := x.note(s, member, "gather"); err != nil || member > 0 {
		return err
	}
	for _, o := range lists {
		all, total := make([][]float32, len(o.X)), 0
		for m := range all {
			var err error
			if all[m], err = fakeFloats(o.X[m]); err != nil {
				return err
			}
			total += o.Columns[m]
		}
		y := make([]float32, 0, o.Rows*total)
		for row := range o.Rows {
			for m, n := range o.Columns {
				y = append(y, all[m][row*n:][:n]...)
			}
		}
		for m := range all {
			if err := fakeStore(o.Y[m], y); err != nil {
				return err
			}
		}
	}
	return nil
}

func (x *fakeExchange) MergeParts(s *cuda.Stream, o *layers.PartStates, member int) error {
	if err := x.note(s, member, "merge"); err != nil || member > 0 {
		return err
	}
	n := o.Rows * o.Heads
	read := func(list []ongpu.Mem, elements int) (all [][]float32, err error) {
		for _, m := range list {
			m.Len = elements
			f, err := fakeFloats(m)
			if err != nil {
				return nil, err
			}
			all = append(all, f)
		}
		return all, nil
	}
	var of [4][][]float32
	for i, list := range [...][]ongpu.Mem{o.Out, o.LSE, o.Own, o.OwnLSE} {
		var err error
		if of[i], err = read(list, []int{n * o.Dim, n}[i%2]); err != nil {
			return err
		}
	}
	outs, lses, own, ownLSE := of[0], of[1], of[2], of[3]
	each := o.Heads / (len(o.Out) / o.Places)
	for m := range o.Y {
		out, lse := make([]float32, n*o.Dim), make([]float32, n)
		for at := range n {
			var parts []lean.Normalized[float32]
			for i := range o.Places {
				of := at%o.Heads/each*o.Places + i
				parts = append(parts, lean.Normalized[float32]{O: outs[of][at*o.Dim:][:o.Dim], LSE: lses[of][at]})
			}
			if own != nil {
				parts = append(parts, lean.Normalized[float32]{O: own[m][at*o.Dim:][:o.Dim], LSE: ownLSE[m][at]})
			}
			lse[at] = lean.MergeNormalized(out[at*o.Dim:][:o.Dim], parts)
		}
		if o.Scatter {
			own := o.Heads / len(o.Y)
			var outs, lses []float32
			for row := range o.Rows {
				first := row*o.Heads + m*own
				outs, lses = append(outs, out[first*o.Dim:][:own*o.Dim]...), append(lses, lse[first:][:own]...)
			}
			out, lse = outs, lses
		}
		y := o.Y[m]
		y.Len = len(out)
		if err := fakeStore(y, out); err != nil {
			return err
		}
		if o.YLSE != nil {
			if err := fakeStore(o.YLSE[m], lse); err != nil {
				return err
			}
		}
	}
	return nil
}

// UseFakeEngine makes GPUs that are opened from now on compute on the CPU.
func UseFakeEngine(t testing.TB) {
	real, exchange := ongpu.NewAttentionEngine, kvstore.OpenExchange
	ongpu.NewAttentionEngine = func(dev, _ *cuda.Device) (ongpu.AttentionEngine, error) { return &fakeEngine{dev: dev}, nil }
	kvstore.OpenExchange = func(g *ongpu.GPU, op string) (kvstore.Exchanging, error) { return &fakeExchange{g}, nil }
	t.Cleanup(func() { ongpu.NewAttentionEngine, kvstore.OpenExchange = real, exchange })
}

// fakeEngine has the memory and the calls of a real one.
type fakeEngine struct {
	dev   *cuda.Device
	mu    sync.Mutex // of all that follows, and of every plan
	plans int
	calls []string // what was asked of plans
	fail  error    // of the next Run
	limit error    // of the next Build
	trees error    // of Supports, for a tree

	closed bool
}

func (e *fakeEngine) Supports(g *attn.Problem) error {
	if g.Dim == 13 {
		return errFakeSupport
	}
	if g.Tree && e.trees != nil {
		return e.trees
	}
	const (
		scores = attn.Window | attn.SinkTokens | attn.Cap | attn.SlopesOfHeads | attn.Sinks
		can    = attn.Causal | attn.Trees | attn.Rotates | attn.OtherValueDim | attn.OtherPolicy | attn.SetTiles | attn.SetWorkers | attn.Unfused | scores
	)
	if f := g.Features(); f&^can != 0 || f&attn.Unfused != 0 && f&scores != 0 { // the CPU engine could, and a GPU can't
		return attention.HasKernel(g)
	}
	return nil
}

func (e *fakeEngine) NewBackward(g *attn.Gradient, kv attn.DType) (*attention.Backward, error) {
	if err := attention.CanBackward("backward", g, kv); err != nil {
		return nil, err
	}
	return nil, fmt.Errorf("the fake engine: %w", attn.ErrUnsupported)
}

func (e *fakeEngine) Close() error { e.closed = true; return nil }

func (e *fakeEngine) NewPlan() ongpu.AttentionPlan {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.plans++
	return &fakePlan{engine: e}
}

type fakePlan struct {
	engine *fakeEngine
	g      attn.Problem
	seqs   []attn.Sequence
	rows   int
	slots  []int // where new tokens go; nil: they are the last keys
	plan   cpuattention.Plan
	host   *cuda.Host
	there  *cuda.Buffer
	ready  bool

	generation uint64
}

func (p *fakePlan) BuildPart(g attn.Problem, seqs []attn.Sequence, rows int, slots []int) (err error) {
	p.engine.mu.Lock()
	defer p.engine.mu.Unlock()
	p.engine.calls = append(p.engine.calls, "build")
	if err := p.engine.limit; err != nil {
		p.engine.limit = nil
		return err
	}
	p.ready = false
	if p.host == nil {
		if p.host, err = p.engine.dev.NewHost(64); err != nil {
			return err
		}
	}
	if p.there == nil {
		if p.there, err = p.engine.dev.NewBuffer(64); err != nil {
			return err
		}
	}
	p.g, p.rows, p.slots, p.seqs = g, rows, slices.Clone(slots), p.seqs[:0]
	for _, s := range seqs {
		s.Pages = slices.Clone(s.Pages)
		p.seqs = append(p.seqs, s)
	}
	g.Rotary = attn.Rotary{} // what attends gets rotated queries
	return p.plan.Build(g, p.seqs)
}

func (p *fakePlan) Reserve(attention.Capacity) error { return nil }

func (p *fakePlan) Generation() uint64 { return p.generation }

func (p *fakePlan) Recorded() {}

func (p *fakePlan) Upload(s *cuda.Stream) error {
	p.engine.mu.Lock()
	defer p.engine.mu.Unlock()
	p.engine.calls = append(p.engine.calls, "upload")
	p.ready = true
	return s.Upload(p.there, 0, p.host, 0, 64)
}

func (p *fakePlan) Close() error { return errors.Join(p.host.Close(), p.there.Close()) }

// launch has the stream do what a launch does for what is put off.
func (p *fakePlan) launch(s *cuda.Stream) error {
	_, err := s.Done()
	return err
}

// Lay plans anew.
func (p *fakePlan) Lay(query, out, lse attn.Strides) {
	p.engine.mu.Lock()
	defer p.engine.mu.Unlock()
	p.g.Query, p.g.Out, p.g.LSE = query, out, lse
	g := p.g
	g.Rotary = attn.Rotary{}
	if err := p.plan.Build(g, p.seqs); err != nil {
		panic(err)
	}
}

// AppendRotated turns queries and keys one by one, and appends.
func (p *fakePlan) AppendRotated(s *cuda.Stream, pages attention.Pages, newK, newV, q, rotated ongpu.Mem, heads int) error {
	p.engine.mu.Lock()
	defer p.engine.mu.Unlock()
	if err := p.launch(s); err != nil {
		return err
	}
	if q.Buffer == rotated.Buffer && q.Offset < rotated.Offset+rotated.Size() && rotated.Offset < q.Offset+q.Size() {
		return errors.New("queries are overwritten")
	}
	if heads == 0 {
		heads = p.g.KVHeads
	}
	dim := p.g.Dim
	for _, x := range [...]struct {
		from, to ongpu.Mem
		at       attn.Strides
		heads    int
	}{
		{q, rotated, p.g.Query, p.g.Heads}, {newK, newK, attn.Strides{Row: heads * dim, Head: dim}, p.g.KVHeads},
	} {
		from, err := fakeFloats(x.from)
		if err != nil {
			return err
		}
		to, err := fakeFloats(x.to)
		if err != nil {
			return err
		}
		for i := range p.seqs {
			seq := &p.seqs[i]
			for j := range seq.Queries {
				var cos, sin []float64
				for pair := range p.g.Rotary.Turns.Len() {
					s, c := math.Sincos(p.g.Rotary.Turns.Of(pair).Angle(seq.Position(j)))
					cos, sin = append(cos, p.g.Rotary.Factor*c), append(sin, p.g.Rotary.Factor*s)
				}
				for h := range x.heads {
					at := (seq.Row+j)*x.at.Row + h*x.at.Head
					cpuattention.Turn(to[at:at+dim], from[at:at+dim], p.g.Rotary.First, cos, sin, p.g.Rotary.Interleaved)
				}
			}
		}
		if x.to == rotated {
			if err := fakeStore(rotated, to); err != nil {
				return err
			}
			continue
		}
		if err := p.append(&pages, newV, to, heads); err != nil {
			return err
		}
	}
	return nil
}

func (p *fakePlan) AppendRows(s *cuda.Stream, to attention.Pages, newK, newV ongpu.Mem, heads int) error {
	p.engine.mu.Lock()
	defer p.engine.mu.Unlock()
	if err := p.launch(s); err != nil {
		return err
	}
	keys, err := fakeFloats(newK)
	if err != nil {
		return err
	}
	return p.append(&to, newV, keys, heads)
}

// append stores new keys and values.
func (p *fakePlan) append(to *attention.Pages, newV ongpu.Mem, keys []float32, heads int) error {
	p.engine.calls = append(p.engine.calls, "append")
	if !p.ready {
		return errors.New("append before the plan was uploaded")
	}
	values, err := fakeFloats(newV)
	if err != nil {
		return err
	}
	for _, x := range [...]struct {
		to    ongpu.Mem
		fresh []float32
		at    attn.PageStrides
		dim   int
	}{{to[0].Data, keys, p.g.Pages.Planes[0].At, p.g.Dim}, {to[1].Data, values, p.g.Pages.Planes[1].At, p.g.ValueDim}} {
		slab := operand.NewBuffer(x.to.DType, x.to.Len)
		if err := x.to.Buffer.Download(slabBytes(slab), x.to.Offset); err != nil {
			return err
		}
		from := attn.Strides{Row: p.g.KVHeads * x.dim, Head: x.dim}
		if heads > 0 {
			from.Row = heads * x.dim
		}
		if p.slots != nil {
			p.put(slab, x.at, x.dim, x.fresh, from)
		} else if err := cpuattention.Append(cpu.Default(), &p.g, p.seqs, slab, x.at, x.dim, x.fresh, from); err != nil {
			return err
		}
		if err := x.to.Buffer.Upload(x.to.Offset, slabBytes(slab)); err != nil {
			return err
		}
	}
	return nil
}

// put is append to slots that are given.
func (p *fakePlan) put(to cpu.Buffer, at attn.PageStrides, dim int, fresh []float32, from attn.Strides) {
	for row, slot := range p.slots {
		for h := 0; slot >= 0 && h < p.g.KVHeads; h++ {
			for i, x := range fresh[row*from.Row+h*from.Head:][:dim] {
				n := slot/p.g.PageTokens*at.Page + h*at.Head + slot%p.g.PageTokens*at.Row + i
				switch e := unsafe.Add(to.Ptr, n*to.DType.Size()); to.DType {
				case attn.Float16:
					*(*half.Float16)(e) = half.FromFloat64(float64(x))
				case attn.BFloat16:
					*(*half.BFloat16)(e) = half.BFromFloat64(float64(x))
				default:
					*(*float32)(e) = x
				}
			}
		}
	}
}

// Merge merges as the formula says.
func (e *fakeEngine) Merge(s *cuda.Stream, p *attention.Parts, b *cuda.Buffer, to *attention.Merged) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.calls = append(e.calls, "merge")
	if _, err := s.Done(); err != nil {
		return err
	}
	out, err := fakeFloats(to.Out)
	if err != nil {
		return err
	}
	var lse []float32
	if to.LSE.Buffer != nil {
		if lse, err = fakeFloats(to.LSE); err != nil {
			return err
		}
	}
	allOut, allLSE := p.State(b, 0)
	states := make([][]float32, 2)
	for i, m := range [...]ongpu.Mem{allOut, allLSE} {
		if states[i], err = fakeFloats(m); err != nil {
			return err
		}
	}
	for at := range to.Rows * p.Heads {
		row, head := at/p.Heads, at%p.Heads
		var parts []lean.Normalized[float32]
		for i := range p.Count {
			n := i*p.Rows*p.Heads + at
			parts = append(parts, lean.Normalized[float32]{O: states[0][n*p.Dim:][:p.Dim], LSE: states[1][n]})
		}
		l := lean.MergeNormalized(out[row*to.OutAt.Row+head*to.OutAt.Head:][:p.Dim], parts)
		if lse != nil {
			lse[row*to.LSEAt.Row+head*to.LSEAt.Head] = l
		}
	}
	if lse != nil {
		if err := fakeStore(to.LSE, lse); err != nil {
			return err
		}
	}
	return fakeStore(to.Out, out)
}

func (p *fakePlan) Run(s *cuda.Stream, o *ongpu.AttentionOperands) error {
	p.engine.mu.Lock()
	defer p.engine.mu.Unlock()
	if err := p.launch(s); err != nil {
		return err
	}
	p.engine.calls = append(p.engine.calls, "run")
	if !p.ready {
		return errors.New("run before the plan was uploaded")
	}
	if err := p.engine.fail; err != nil {
		p.engine.fail = nil
		return err
	}
	// A kernel writes while it reads.
	for _, in := range [...]ongpu.Mem{o.Q, o.Pages[0].Data, o.Pages[1].Data} {
		for _, out := range [...]ongpu.Mem{o.Out, o.LSE} {
			if in.Buffer == out.Buffer && in.Offset < out.Offset+out.Size() && out.Offset < in.Offset+in.Size() {
				return errors.New("an operand is overwritten")
			}
		}
	}
	q, err := fakeFloats(o.Q)
	if err != nil {
		return err
	}
	out, err := fakeFloats(o.Out)
	if err != nil {
		return err
	}
	operands := cpuattention.Operands[float32]{Q: q, Out: out, Pages: attn.InPlanes(operand.NewBuffer(o.Pages[0].Data.DType, o.Pages[0].Data.Len), operand.NewBuffer(o.Pages[1].Data.DType, o.Pages[1].Data.Len))}
	if err := errors.Join(o.Pages[0].Data.Buffer.Download(slabBytes(operands.Pages[0].Data), o.Pages[0].Data.Offset), o.Pages[1].Data.Buffer.Download(slabBytes(operands.Pages[1].Data), o.Pages[1].Data.Offset)); err != nil {
		return err
	}
	if o.LSE.Buffer != nil {
		if o.LSE.DType != attn.Float32 {
			return fmt.Errorf("log-sum-exp is %v", o.LSE.DType)
		}
		if operands.LSE, err = fakeFloats(o.LSE); err != nil {
			return err
		}
	}
	if p.g.Sinks {
		if o.Sinks.DType != attn.Float32 {
			return fmt.Errorf("sinks are %v", o.Sinks.DType)
		}
		if operands.Sinks, err = fakeFloats(o.Sinks); err != nil {
			return err
		}
		operands.Sinks = operands.Sinks[:p.g.Heads] // of several GPUs those of the next ones follow
	}
	p.clearRows(&operands)
	if err := cpuattention.Run(cpu.Default(), &p.plan, &operands); err != nil {
		return err
	}
	if operands.LSE != nil {
		if err := fakeStore(o.LSE, operands.LSE); err != nil {
			return err
		}
	}
	return fakeStore(o.Out, out)
}

// clearRows gives rows of no sequence what queries that see no key get.
func (p *fakePlan) clearRows(o *cpuattention.Operands[float32]) {
	for row := range p.rows {
		if slices.ContainsFunc(p.seqs, func(s attn.Sequence) bool { return s.Row <= row && row < s.Row+s.Queries }) {
			continue
		}
		for h := range p.g.Heads {
			clear(o.Out[row*p.g.Out.Row+h*p.g.Out.Head:][:p.g.ValueDim])
			if o.LSE != nil {
				o.LSE[row*p.g.LSE.Row+h*p.g.LSE.Head] = o.Sink(h)
			}
		}
	}
}

// fakeFloats is what memory of the fake driver holds.
func fakeFloats(m ongpu.Mem) ([]float32, error) {
	bytes := make([]byte, m.Len*m.DType.Size())
	if err := m.Buffer.Download(bytes, m.Offset); err != nil {
		return nil, err
	}
	x := make([]float32, m.Len)
	for i := range x {
		p := unsafe.Pointer(&bytes[i*m.DType.Size()])
		switch m.DType {
		case attn.Float16:
			x[i] = (*(*half.Float16)(p)).Float32()
		case attn.BFloat16:
			x[i] = (*(*half.BFloat16)(p)).Float32()
		default:
			x[i] = *(*float32)(p)
		}
	}
	return x, nil
}

func fakeStore(m ongpu.Mem, x []float32) error {
	bytes := make([]byte, m.Len*m.DType.Size())
	for i, f := range x {
		p := unsafe.Pointer(&bytes[i*m.DType.Size()])
		switch m.DType {
		case attn.Float16:
			*(*half.Float16)(p) = half.FromFloat64(float64(f))
		case attn.BFloat16:
			*(*half.BFloat16)(p) = half.BFromFloat64(float64(f))
		default:
			*(*float32)(p) = f
		}
	}
	return m.Buffer.Upload(m.Offset, bytes)
}

// fakeOf is a GPU's engine of attention.
func fakeOf(g *ongpu.GPU) *fakeEngine {
	e, err := g.Attention("test")
	if err != nil {
		panic(err)
	}
	return e.(*fakeEngine)
}
