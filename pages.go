package leanattention

import (
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/dense"
	"gorgonia.org/leanattention/internal/lean"
	"gorgonia.org/leanattention/internal/ongpu"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// pageStore is where the pages of a cache live: memory of the host, or of a GPU.
// Layers compute where their pages are. What pages mean, and who holds them, is
// the cache's affair.
type pageStore interface {
	where() string
	// places is how many places pages are dealt out to: page i is in place i mod places.
	places() int
	// supports refuses a geometry that layers can't have here.
	supports(op string, g *attn.Problem) error
	// operands describes q, k and v of a run, and the sinks if there are any, if layers can use them where they are.
	operands(op string, in []G.Value) ([4]operand, error)
	// copyPages copies pages of all layers, before what is computed next.
	copyPages(op string, copies []pageCopy) error
	// moveSlots copies tokens of all layers within their pages, one after the other, before what is
	// computed next.
	moveSlots(op string, moves []slotMove) error
	// transfer copies between pages of one layer and memory of the caller: to the
	// pages if in is set. It is behind what was computed before, and done when it
	// returns.
	transfer(op string, t *pageTransfer, in bool) error
	// newPlan is a plan for layers of g in a step.
	newPlan(step *Step, g attn.Problem) layerPlan
	// close gives up the memory. No call runs, and none will.
	close() error
}

// pageCopy copies page from to page to.
type pageCopy struct{ to, from int32 }

// slotMove copies a token's keys and values to the place of another one.
type slotMove struct{ to, from slotPlace }

// slotPlace is where a token lies.
type slotPlace struct {
	page int32
	slot int
}

// bytes are where the places of a move lie in a layer's keys or values, of which a page has so many bytes, for each head.
func (m slotMove) bytes(head, heads, size, page int) (to, from, n int) {
	n = page / heads / size
	at := func(p slotPlace) int { return int(p.page)*page + (head*size+p.slot)*n }
	return at(m.to), at(m.from), n
}

// pageTransfer is some of the keys (or values) of a layer, and memory for them, in
// the order of the spans.
type pageTransfer struct {
	layer  int
	values bool
	spans  []span
	memory []byte
}

// span is n bytes of a layer's keys or values.
type span struct{ at, n int }

// layerPlan is the schedule for the layers of one geometry, step after step.
type layerPlan interface {
	// build plans the sequences of a step of so many rows. It keeps seqs.
	build(op string, seqs []attn.Sequence, rows int) error
	// attend appends k and v to a layer, and attends to it. lse is nil unless the call
	// wants it.
	attend(op string, c *layerCall) (out, lse G.Value, err error)
}

// layerCall is a run of a layer.
type layerCall struct {
	node *stepNode // whose layer it is
	rows tokenRows
	qkv  []G.Value // query, key and value, as operands has seen them

	sinks  G.Value       // with them; nil: there are none
	lse    bool          // the log-sum-exp is wanted
	out    *DeviceTensor // takes the output, on the GPU of qkv; nil: a new value does
	memory *ongpu.Node   // of new outputs and log-sum-exps on a GPU
}

// hostPages are pages in Go's memory.
type hostPages struct {
	pages        int
	heads, size  int          // of a page: its KV heads, and its tokens
	keys, values []cpu.Buffer // one for each layer
}

func newHostPages(c *CacheConfig, storage attn.DType, keyElements, valueElements int) *hostPages {
	h := &hostPages{pages: c.Pages, heads: c.KVHeads, size: c.PageSize}
	for range c.Layers {
		h.keys = append(h.keys, newBuffer(storage, keyElements))
		h.values = append(h.values, newBuffer(storage, valueElements))
	}
	return h
}

func (h *hostPages) where() string { return hostName }
func (h *hostPages) places() int   { return 1 }
func (h *hostPages) supports(op string, g *attn.Problem) error {
	if g.Unfused {
		return errUnfused(op)
	}
	return nil
}

func (h *hostPages) newPlan(_ *Step, g attn.Problem) layerPlan {
	return &hostPlan{pages: h, geometry: g, plan: cpu.Plan{PrefixBytes: prefixBytes}}
}

// prefixBytes is that of new plans. Tests set it.
var prefixBytes int

func (h *hostPages) close() error { h.keys, h.values = nil, nil; return nil }

// layerNames are the names of a layer's inputs.
var layerNames = [...]string{"q", "k", "v", "sinks"}

func (h *hostPages) operands(op string, in []G.Value) (o [4]operand, err error) {
	for i, v := range in {
		name := layerNames[i]
		if at := placeOf(v); at != nil {
			return o, errorf(op, ErrUnsupported, "%s is on %v and the cache in %s", name, at, hostName)
		}
		t, err := denseValue(op, name, v)
		if err != nil {
			return o, err
		}
		o[i] = valueOperand(name, t)
	}
	return o, nil
}

func (h *hostPages) transfer(_ string, t *pageTransfer, in bool) error {
	b := h.keys[t.layer]
	if t.values {
		b = h.values[t.layer]
	}
	pages, memory := bufferBytes(b), t.memory
	for _, s := range t.spans {
		if in {
			copy(pages[s.at:s.at+s.n], memory)
		} else {
			copy(memory, pages[s.at:s.at+s.n])
		}
		memory = memory[s.n:]
	}
	return nil
}

func (h *hostPages) copyPages(_ string, copies []pageCopy) error {
	for _, buffers := range [...][]cpu.Buffer{h.keys, h.values} {
		for _, b := range buffers {
			bytes := bufferBytes(b)
			n := len(bytes) / h.pages
			for _, c := range copies {
				copy(bytes[int(c.to)*n:(int(c.to)+1)*n], bytes[int(c.from)*n:])
			}
		}
	}
	return nil
}

func (h *hostPages) moveSlots(_ string, moves []slotMove) error {
	for _, buffers := range [...][]cpu.Buffer{h.keys, h.values} {
		for _, b := range buffers {
			bytes := bufferBytes(b)
			for _, m := range moves {
				for head := range h.heads {
					to, from, n := m.bytes(head, h.heads, h.size, len(bytes)/h.pages)
					copy(bytes[to:to+n], bytes[from:])
				}
			}
		}
	}
	return nil
}

// hostPlan is a layerPlan for the CPU engine.
type hostPlan struct {
	pages    *hostPages
	geometry attn.Problem
	plan     cpu.Plan
	seqs     []attn.Sequence
}

func (p *hostPlan) build(op string, seqs []attn.Sequence, _ int) error {
	p.seqs = seqs
	g := p.geometry
	g.Tree = attn.HasTrees(seqs)
	if err := p.plan.Build(g, seqs); err != nil {
		return engineError(op, "plan", err)
	}
	return nil
}

func (p *hostPlan) attend(op string, c *layerCall) (out, lse G.Value, err error) {
	if c.rows.query == tensor.Float32 {
		out, lse, err = attendLayer[float32](p, c)
	} else {
		out, lse, err = attendLayer[float64](p, c)
	}
	if err != nil {
		return nil, nil, engineError(op, c.node.String(), err)
	}
	return out, lse, nil
}

func attendLayer[F lean.Float](p *hostPlan, c *layerCall) (out, lse G.Value, err error) {
	g, layer, q := &p.geometry, c.node.layer, c.qkv[0].(*tensor.Dense)
	o := tensor.New(tensor.Of(c.rows.query), tensor.WithShape(c.rows.outShape(g.ValueDim)...))
	operands := &cpu.Operands[F]{Q: dense.Elements[F](q), Out: dense.Backing[F](o), K: p.pages.keys[layer], V: p.pages.values[layer]}
	if c.sinks != nil {
		operands.Sinks = dense.Elements[F](c.sinks.(*tensor.Dense))
	}
	if c.lse {
		l := tensor.New(tensor.Of(c.rows.query), tensor.WithShape(c.rows.lseShape()...))
		operands.LSE, lse = dense.Backing[F](l), l
		for i := range operands.LSE { // rows that belong to nobody see no key
			operands.LSE[i] = operands.Sink(i % g.Heads)
		}
	}
	for _, x := range [...]struct {
		to     cpu.Buffer
		at     attn.PageStrides
		dim    int
		t      *tensor.Dense
		turned bool
	}{
		{operands.K, g.Key, g.Dim, c.qkv[1].(*tensor.Dense), g.Rotary != attn.Rotary{}},
		{operands.V, g.Value, g.ValueDim, c.qkv[2].(*tensor.Dense), false},
	} {
		from := attn.Strides{Row: g.KVHeads * x.dim, Head: x.dim}
		if x.turned {
			err = cpu.AppendTurned(&p.plan, p.seqs, x.to, dense.Elements[F](x.t), from)
		} else {
			err = cpu.Append(g, p.seqs, x.to, x.at, x.dim, dense.Elements[F](x.t), from)
		}
		if err != nil {
			return nil, nil, err
		}
	}
	if err := cpu.Run(cpu.Default(), &p.plan, operands); err != nil {
		return nil, nil, err
	}
	return o, lse, nil
}
