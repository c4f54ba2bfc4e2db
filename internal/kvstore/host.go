package kvstore

import (
	"math"
	"slices"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	cpuattention "gorgonia.org/leanattention/internal/cpu/attention"
	"gorgonia.org/leanattention/internal/dense"
	"gorgonia.org/leanattention/internal/errs"
	"gorgonia.org/leanattention/internal/lean"
	"gorgonia.org/leanattention/internal/ongpu"
	"gorgonia.org/leanattention/internal/operand"
	"gorgonia.org/tensor"
)

// HostPages is a Store in host memory.
type HostPages struct {
	config *Config
	Layers []attn.Memory[cpu.Buffer] // the slabs of each layer
}

func NewHost(c *Config) *HostPages {
	h := &HostPages{config: c, Layers: make([]attn.Memory[cpu.Buffer], c.Layers)}
	for i := range h.Layers {
		f := c.FormatOf(i)
		for s := range f.Slabs {
			*h.Layers[i].At(s) = operand.NewBuffer(s.DType, c.Pages*s.PageBytes(c.KVHeads, c.PageSize)/s.DType.Size())
		}
		for p := range f.ScaledByHead {
			h.Layers[i][p].Scales = c.headScales(i, p)
		}
	}
	return h
}

// headScales returns the scales of a layer's heads in a plane: those of values behind those of keys.
func (c *Config) headScales(layer, plane int) cpu.Buffer {
	given := c.KeyScales
	if plane >= c.Format.KeyPlanes {
		given = c.ValueScales
	}
	b := operand.NewBuffer(attn.Float32, c.KVHeads)
	for i := range c.KVHeads {
		*(*float32)(b.At(i)) = HeadScale(given, layer*c.KVHeads+i)
	}
	return b
}

func (h *HostPages) Where() string { return errs.Host }

func (h *HostPages) Shards() int { return 1 }

func (h *HostPages) Supports(op string, g *attn.Problem) error {
	if g.Unfused {
		return errs.Unfused(op)
	}
	return nil
}

func (h *HostPages) NewPlan(_ int, g attn.Problem) Plan {
	return &hostPlan{pages: h, geometry: g, plan: cpuattention.Plan{PrefixBytes: PrefixBytes}}
}

// PrefixBytes is the PrefixBytes of new plans. Tests set this variable.
var PrefixBytes int

func (h *HostPages) Close() error { h.Layers = nil; return nil }

func (h *HostPages) Operands(op string, in []G.Value) (o [4]operand.Operand, err error) {
	for i, v := range in {
		name := LayerNames[i]
		if at := ongpu.PlaceOf(v); at != nil {
			return o, errs.Errorf(op, errs.ErrUnsupported, "%s is on %v and the cache in %s", name, at, errs.Host)
		}
		t, err := ongpu.Dense(op, name, v)
		if err != nil {
			return o, err
		}
		o[i] = operand.OfTensor(name, t)
	}
	return o, nil
}

func (h *HostPages) Transfer(_ string, t *Transfer, in bool) error {
	pages, memory := operand.BufferBytes(*h.Layers[t.Layer].At(t.Slab)), t.Memory
	for _, s := range t.Spans {
		if in {
			copy(pages[s.At:s.At+s.N], memory)
		} else {
			copy(memory, pages[s.At:s.At+s.N])
		}
		memory = memory[s.N:]
	}
	return nil
}

func (h *HostPages) CopyPages(_ string, copies []Copy) error {
	h.eachSlab(func(s attn.Slab, bytes []byte) {
		n := s.PageBytes(h.config.KVHeads, h.config.PageSize)
		for _, c := range copies {
			copy(bytes[int(c.To)*n:(int(c.To)+1)*n], bytes[int(c.From)*n:])
		}
	})
	return nil
}

func (h *HostPages) MoveSlots(_ string, moves []Move) error {
	h.eachSlab(func(s attn.Slab, bytes []byte) {
		for _, m := range moves {
			for head := range h.config.KVHeads {
				to, from, n := m.bytes(s, head, h.config.KVHeads, h.config.PageSize)
				copy(bytes[to:to+n], bytes[from:])
			}
		}
	})
	return nil
}

// eachSlab visits the slabs of all layers.
func (h *HostPages) eachSlab(visit func(s attn.Slab, bytes []byte)) {
	for i := range h.Layers {
		for s := range h.config.FormatOf(i).Slabs {
			visit(s, operand.BufferBytes(*h.Layers[i].At(s)))
		}
	}
}

// hostPlan is a Plan for the CPU engine.
type hostPlan struct {
	pages    *HostPages
	geometry attn.Problem
	plan     cpuattention.Plan
	seqs     []attn.Sequence
	stored   []attn.Sequence   // seqs with new tokens to store
	apart    cpuattention.Plan // of plan's step, without shared prefixes
	isApart  bool              // apart is of plan's step
}

func (p *hostPlan) Build(op string, seqs []attn.Sequence, _ int) error {
	p.seqs, p.stored, p.isApart = seqs, seqs, false
	if only := func(q attn.Sequence) bool { return q.QueryOnly }; slices.ContainsFunc(seqs, only) {
		p.stored = slices.DeleteFunc(slices.Clone(seqs), only)
	}
	g := p.geometry
	g.Tree = attn.HasTrees(seqs)
	if err := p.plan.Build(g, seqs); err != nil {
		return errs.Engine(op, "plan", err)
	}
	return nil
}

// ofEach returns the step's plan in which each sequence attends to its keys by itself, as attention mass needs it.
func (p *hostPlan) ofEach() (*cpuattention.Plan, error) {
	if !p.plan.Shares() {
		return &p.plan, nil
	}
	if !p.isApart {
		g := p.geometry
		g.Tree = attn.HasTrees(p.seqs)
		p.apart.PrefixBytes = math.MaxInt
		if err := p.apart.Build(g, p.seqs); err != nil {
			return nil, err
		}
		p.isApart = true
	}
	return &p.apart, nil
}

func (p *hostPlan) Attend(op string, c *Call) (out, lse G.Value, err error) {
	if err := p.plan.CheckTensors(c.Tensors); err != nil {
		return nil, nil, errs.Errorf(op, errs.ErrShape, "%v: WithVariant: %v", c.Node, err)
	}
	if c.Rows.Query == tensor.Float32 {
		out, lse, err = attendLayer[float32](p, c)
	} else {
		out, lse, err = attendLayer[float64](p, c)
	}
	if err != nil {
		return nil, nil, errs.Engine(op, c.Node.String(), err)
	}
	return out, lse, nil
}

// clearOthers clears the rows of an output that belong to no sequence.
func clearOthers[F lean.Float](p *hostPlan, out []F) {
	n, end := 0, 0
	for i := range p.seqs {
		n, end = n+p.seqs[i].Queries, max(end, p.seqs[i].Row+p.seqs[i].Queries)
	}
	if n < end { // there are gaps between the sequences
		end = 0
	}
	clear(out[end*p.geometry.Heads*p.geometry.ValueDim:])
}

func attendLayer[F lean.Float](p *hostPlan, c *Call) (out, lse G.Value, err error) {
	g, layer, q := &p.geometry, c.Layer, c.QKV[0].(*tensor.Dense)
	o, elements := dense.Unwritten[F](c.Rows.Query, c.Rows.outShape(g.ValueDim))
	clearOthers(p, elements)
	operands := &cpuattention.Operands[F]{Q: dense.Elements[F](q), Out: elements, Pages: p.pages.Layers[layer]}
	if c.Sinks != nil {
		operands.Sinks = dense.Elements[F](c.Sinks.(*tensor.Dense))
	}
	operands.Tensors = c.Tensors
	if c.LSE {
		l := dense.New(c.Rows.Query, c.Rows.LSEShape()...)
		operands.LSE, lse = dense.Backing[F](l), l
		for i := range operands.LSE { // unassigned rows see no key
			operands.LSE[i] = operands.Sink(i % g.Heads)
		}
	}
	if c.Entropy != nil {
		e := dense.New(c.Rows.Query, c.Rows.LSEShape()...) // unassigned rows have 0
		operands.Entropy, *c.Entropy = dense.Backing[F](e), e
	}
	plan := &p.plan
	if c.Mass != nil {
		m := dense.New(c.Rows.Query, c.Rows.MassShape(c.Places)...) // unassigned rows have 0
		operands.Mass, operands.Tiles, *c.Mass = dense.Backing[F](m), c.Places, m
		if plan, err = p.ofEach(); err != nil {
			return nil, nil, err
		}
	}
	rows := func(v G.Value, dim int) cpuattention.NewRows[F] {
		return cpuattention.NewRows[F]{Rows: dense.Elements[F](v.(*tensor.Dense)), From: attn.PackedRows(g.KVHeads, dim)}
	}
	keys, values := rows(c.QKV[1], g.Dim), cpuattention.NewRows[F]{}
	if !g.Pages.InKeys() {
		values = rows(c.QKV[2], g.ValueDim)
	}
	if err := cpuattention.AppendLayer(cpu.Default(), &p.plan, p.stored, &operands.Pages, keys, values); err != nil {
		return nil, nil, err
	}
	if err := cpuattention.Run(cpu.Default(), plan, operands); err != nil {
		return nil, nil, err
	}
	return o, lse, nil
}
