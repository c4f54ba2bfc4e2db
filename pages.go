package leanattention

import (
	"errors"
	"fmt"
	"math"
	"slices"

	"gorgonia.org/leanattention/internal/operand"

	"gorgonia.org/leanattention/internal/errs"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	cpuattention "gorgonia.org/leanattention/internal/cpu/attention"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/dense"
	"gorgonia.org/leanattention/internal/gpu/attention"
	"gorgonia.org/leanattention/internal/gpu/decoder"
	"gorgonia.org/leanattention/internal/lean"
	"gorgonia.org/leanattention/internal/ongpu"
	"gorgonia.org/leanattention/internal/pages"
	"gorgonia.org/leanattention/internal/queue"

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
	operands(op string, in []G.Value) ([4]operand.Operand, error)
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

// Need is the number of free pages that a step of these appends takes, whatever the step's number of rows. Nothing
// changes. Set of them is [ErrCacheFull] exactly if Need is more than [CacheStats].FreePages at that time. So a server can
// tell which sequences the next step has room for, before it sets the step.
//
// Appends that the cache has no room for, even if all other sequences are released, are [ErrLength], here and in Set:
// waiting does not help. Where the cache has a [CacheConfig].Window, the appends may have room in several steps
// ([Chunks]), since each Commit gives pages back.
//
// Other errors are those of Set: [ErrState], [ErrLength], [ErrClosed].
func (c *Cache) Need(appends []Append) (pages int, err error) {
	const op = "Need"
	if err := c.made(op); err != nil {
		return 0, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return 0, errs.Errorf(op, ErrClosed, "cache")
	}
	if pages, err = c.need(op, appends, math.MaxInt); err == nil {
		err = c.never(op, appends)
	}
	if err != nil {
		return 0, err
	}
	return pages, nil
}

// Check looks for inconsistencies: of free pages, page tables and reservations, of the numbers of their holders, and of
// sequences, open steps and counts. There is none, unless this package has a defect: so the error is [ErrInternal], and names what
// was found. Check is for tests, and for servers that want to know before they go on behind an error. It takes time that grows
// with the number of pages and sequences, while other calls on the cache wait. Errors: [ErrInternal], [ErrClosed].
func (c *Cache) Check() (err error) {
	const op = "Check"
	if err := c.made(op); err != nil {
		return err
	}
	defer errs.RecoverTo(op, &err)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return errs.Errorf(op, ErrClosed, "cache")
	}
	if err := c.check(); err != nil {
		return errs.Errorf(op, ErrInternal, "%v", err)
	}
	return nil
}

// check is Check with the mu held, which guards what is looked at in steps, too.
func (c *Cache) check() error {
	var tables []*pages.Table
	var open []*pages.Reservation
	sequences, tokens := 0, 0
	for s, counted := range c.holders {
		if err := c.checkSequence(s, counted); err != nil {
			return fmt.Errorf("sequence of %d tokens: %w", s.table.Tokens, err)
		}
		tables = append(tables, &s.table)
		if counted {
			sequences, tokens = sequences+1, tokens+s.table.Tokens
		}
	}
	for s := range c.open {
		if err := c.checkStep(s); err != nil {
			return fmt.Errorf("step of %d rows: %w", s.tokens, err)
		}
		for i := range s.reservations {
			open = append(open, &s.reservations[i].Reservation)
		}
	}
	if sequences != c.sequences || tokens != c.tokens {
		return fmt.Errorf("%d sequences have %d tokens, and %d with %d are counted", sequences, tokens, c.sequences, c.tokens)
	}
	return c.pool.Check(tables, open)
}

func (c *Cache) checkSequence(s *Sequence, counted bool) error {
	config, gap := &c.config, s.table.Gap
	if s.cache != c || s.released || s.mark.Problem("", "") != "" {
		return errors.New("it is of another cache, released or a copy")
	}
	if s.step != nil {
		of := func(r reservation) bool { return r.seq == s }
		if !counted || !c.open[s.step] || !slices.ContainsFunc(s.step.reservations, of) {
			return errors.New("it is in a step that is not open or does not have it")
		}
	}
	if gap == (pages.Gap{}) {
		return nil
	}
	if config.Window == 0 || gap.First != config.SinkTokens || gap.End > s.table.Tokens-config.Window+1 {
		return fmt.Errorf("tokens [%d, %d) were given back, and the cache keeps a Window of %d and %d SinkTokens", gap.First, gap.End, config.Window, config.SinkTokens)
	}
	return nil
}

func (c *Cache) checkStep(s *Step) error {
	if s.cache != c || !s.open || len(s.sequences) != len(s.reservations) {
		return fmt.Errorf("it is of another cache or not open, or has %d reservations for %d sequences", len(s.reservations), len(s.sequences))
	}
	row := 0
	for i := range s.reservations {
		r, seq := &s.reservations[i], &s.sequences[i]
		if !c.holders[r.seq] || r.seq.step != s || !r.Of(&r.seq.table, r.tokens) {
			return fmt.Errorf("append %d has a sequence that is not in the step, or the reservation of another one", i)
		}
		gone := c.pool.Shift(&r.seq.table)
		if seq.Row != row || seq.Queries != r.tokens || seq.Before != gone || seq.Keys != r.seq.table.Tokens-gone+r.tokens || !slices.Equal(seq.Pages, r.Pages) {
			return fmt.Errorf("append %d is computed in rows [%d, %d) with %d keys in pages %v, and has %d tokens from row %d on behind %d, %d of which were given back, in pages %v",
				i, seq.Row, seq.Row+seq.Queries, seq.Keys, seq.Pages, r.tokens, row, r.seq.table.Tokens, gone, r.Pages)
		}
		row += r.tokens
	}
	if row > s.tokens {
		return fmt.Errorf("%d rows are given to sequences", row)
	}
	return nil
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
	out    *ongpu.Tensor // takes the output, on the GPU of qkv; nil: a new value does
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
		h.keys = append(h.keys, operand.NewBuffer(storage, keyElements))
		h.values = append(h.values, operand.NewBuffer(storage, valueElements))
	}
	return h
}

func (h *hostPages) where() string { return errs.Host }
func (h *hostPages) places() int   { return 1 }
func (h *hostPages) supports(op string, g *attn.Problem) error {
	if g.Unfused {
		return errUnfused(op)
	}
	return nil
}

func (h *hostPages) newPlan(_ *Step, g attn.Problem) layerPlan {
	return &hostPlan{pages: h, geometry: g, plan: cpuattention.Plan{PrefixBytes: prefixBytes}}
}

// prefixBytes is that of new plans. Tests set it.
var prefixBytes int

func (h *hostPages) close() error { h.keys, h.values = nil, nil; return nil }

// layerNames are the names of a layer's inputs.
var layerNames = [...]string{"q", "k", "v", "sinks"}

func (h *hostPages) operands(op string, in []G.Value) (o [4]operand.Operand, err error) {
	for i, v := range in {
		name := layerNames[i]
		if at := ongpu.PlaceOf(v); at != nil {
			return o, errs.Errorf(op, ErrUnsupported, "%s is on %v and the cache in %s", name, at, errs.Host)
		}
		t, err := ongpu.Dense(op, name, v)
		if err != nil {
			return o, err
		}
		o[i] = operand.OfTensor(name, t)
	}
	return o, nil
}

func (h *hostPages) transfer(_ string, t *pageTransfer, in bool) error {
	b := h.keys[t.layer]
	if t.values {
		b = h.values[t.layer]
	}
	pages, memory := operand.BufferBytes(b), t.memory
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
			bytes := operand.BufferBytes(b)
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
			bytes := operand.BufferBytes(b)
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
	plan     cpuattention.Plan
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

// clearOthers clears the rows of an output that no sequence has.
func clearOthers[F lean.Float](p *hostPlan, out []F) {
	n, end := 0, 0
	for i := range p.seqs {
		n, end = n+p.seqs[i].Queries, max(end, p.seqs[i].Row+p.seqs[i].Queries)
	}
	if n < end { // not one behind the other
		end = 0
	}
	clear(out[end*p.geometry.Heads*p.geometry.ValueDim:])
}

func attendLayer[F lean.Float](p *hostPlan, c *layerCall) (out, lse G.Value, err error) {
	g, layer, q := &p.geometry, c.node.layer, c.qkv[0].(*tensor.Dense)
	o, elements := dense.Unwritten[F](c.rows.query, c.rows.outShape(g.ValueDim))
	clearOthers(p, elements)
	operands := &cpuattention.Operands[F]{Q: dense.Elements[F](q), Out: elements, K: p.pages.keys[layer], V: p.pages.values[layer]}
	if c.sinks != nil {
		operands.Sinks = dense.Elements[F](c.sinks.(*tensor.Dense))
	}
	if c.lse {
		l := dense.New(c.rows.query, c.rows.lseShape()...)
		operands.LSE, lse = dense.Backing[F](l), l
		for i := range operands.LSE { // rows that belong to nobody see no key
			operands.LSE[i] = operands.Sink(i % g.Heads)
		}
	}
	rows := func(to cpu.Buffer, v G.Value, dim int) cpuattention.NewRows[F] {
		return cpuattention.NewRows[F]{To: to, Rows: dense.Elements[F](v.(*tensor.Dense)), From: attn.PackedRows(g.KVHeads, dim)}
	}
	keys, values := rows(operands.K, c.qkv[1], g.Dim), rows(operands.V, c.qkv[2], g.ValueDim)
	if err := cpuattention.AppendLayer(cpu.Default(), &p.plan, p.seqs, keys, values); err != nil {
		return nil, nil, err
	}
	if err := cpuattention.Run(cpu.Default(), &p.plan, operands); err != nil {
		return nil, nil, err
	}
	return o, lse, nil
}

// What GPUs do where pages are dealt out to them, by context.

// queueByContext is queue of a cache that is sharded by context. Each member appends the new tokens of its pages, attends to what it
// has of each sequence, and leaves states in the memory of the first one, which merges them in the order of
// the places. Where sequences have one new token each, that is all. Else members attend to the keys before the new
// tokens, and the first one to these among themselves, by copies of their keys and values: one part more.
func (p *devicePlan) queueByContext(sub *queue.Submission, layer int, n newRows, o *ongpu.AttentionOperands) error {
	c := p.now.context
	b, err := sub.Use(c.memory, c.generation)
	if err != nil {
		return err
	}
	to := func(part int) (all ongpu.AttentionOperands) {
		all = ongpu.AttentionOperands{Q: o.Q, Sinks: o.Sinks}
		all.Out, all.LSE = c.parts.State(b, part)
		return all
	}
	err = sub.Each(func(i int, sub *queue.Submission) error {
		all := to(p.pages.parts[i].place.Index)
		return sub.Do(func(stream *cuda.Stream) error {
			if err := p.attendPart(stream, i, layer, n, &all); err != nil || i > 0 || c.fresh == nil {
				return err
			}
			fresh := to(p.pages.dealt)
			return c.attendFresh(stream, b, n, &fresh)
		})
	})
	if err != nil {
		return err
	}
	merged := &attention.Merged{Rows: p.rows, Out: o.Out, LSE: o.LSE, OutAt: p.geometry.Out, LSEAt: p.geometry.LSE}
	return sub.Do(func(stream *cuda.Stream) error { return p.pages.gpu.MergeParts(stream, &c.parts, b, merged) })
}

// attendPart queues what a member of a cache that is sharded by context does of a layer: it appends the new tokens of its pages, and
// leaves the states of what it has in the rows of all heads.
func (p *devicePlan) attendPart(stream *cuda.Stream, member, layer int, n newRows, all *ongpu.AttentionOperands) error {
	plan, heads, states := p.now.parts[member].plan, p.pages.parts[member].heads, p.geometry
	states.Out, states.LSE = attn.PackedRows(states.Heads, states.ValueDim), attn.PackedRows(states.Heads, 1)
	mine := heads.operands(&states, all)
	mine.K, mine.V = p.layerPages(member, layer)
	rows := newRows{k: ongpu.From(n.k, heads.first*states.Dim), v: ongpu.From(n.v, heads.first*states.ValueDim)}
	if err := rows.appendTo(plan, stream, &mine, states.KVHeads); err != nil {
		return err
	}
	return plan.Run(stream, &mine)
}

// attendFresh queues attention of new tokens among themselves, by copies of their keys and values in b, which is the memory.
func (c *contextStates) attendFresh(stream *cuda.Stream, b *cuda.Buffer, n newRows, o *ongpu.AttentionOperands) error {
	o.K, o.V = c.keys, c.values
	o.K.Buffer, o.V.Buffer = b, b
	if err := n.appendTo(c.fresh.plan, stream, o, 0); err != nil {
		return err
	}
	return c.fresh.plan.Run(stream, o)
}

// exchanging is what attention apart by context needs of a [decoder.Exchange].
type exchanging interface {
	AllGathers(s *cuda.Stream, lists []*decoder.AllGather, member int) error
	MergeParts(s *cuda.Stream, o *decoder.PartStates, member int) error
	Realign(finish func() error) error
	Failed() error
}

// openExchange is a variable for tests. The GPU is entered.
var openExchange = func(g *ongpu.GPU, op string) (exchanging, error) {
	var engines []*decoder.Engine
	for _, m := range g.Members {
		e, err := m.Layers(op)
		if err != nil {
			return nil, err
		}
		engines = append(engines, e)
	}
	x, err := g.Exchange(op, engines)
	if err != nil { // not a nil in an interface
		return nil, err
	}
	return x, nil
}

// exchange is what the members of a cache that is sharded by context merge through, where all of them have the queries, keys and
// values, or parts of them that they can gather; nil: the first one has them, and merges. What the members need for that is planned. Errors are
// as users are told.
func (p *devicePlan) exchange(op string, c *layerCall, qkv *deviceQKV) (exchanging, error) {
	g := p.pages.gpu
	if p.now.context == nil || c.out != nil || p.rows < 1 || c.sinks != nil && ongpu.Must(c.sinks).Replicas == nil {
		return nil, nil
	}
	for _, d := range qkv {
		parts := d.Shards != nil && d.Axis == 1 && !d.Joined && d.DType == tensor.Float32
		if d.Replicas == nil && !parts {
			return nil, nil
		}
	}
	if p.now.others == nil && g.Group.Recording() { // what the others need is not there
		return nil, nil
	}
	x, err := openExchange(g, op)
	switch {
	case errors.Is(err, ErrUnsupported): // as where there are more members than can exchange
		return nil, nil
	case err != nil:
		return nil, err
	}
	if err := x.Failed(); err != nil {
		return nil, ongpu.Error(op, err)
	}
	if p.merging = true; p.now.others != nil {
		return x, nil
	}
	if err := p.planOthers(op, p.now); err != nil {
		return nil, err
	}
	if err := p.upload(op, p.now); err != nil {
		p.now.others = nil // the next run plans and brings them again
		return nil, err
	}
	return x, nil
}

// attendMerging is attend of a cache that is sharded by context where all members have the queries, keys and values: each attends to
// what it has of each sequence, and, where sequences have several new tokens, to these among themselves; then all merge the
// states of all.
func (p *devicePlan) attendMerging(c *layerCall, qkv *deviceQKV, x exchanging) (out, lse G.Value, err error) {
	lead := p.pages.gpu
	n, g := len(lead.Members), &p.geometry
	works, fresh, states := make([]apartLayer, n), make([]ongpu.AttentionOperands, n), make([]*cuda.Buffer, n)
	merge := &decoder.PartStates{Rows: p.rows, Heads: g.Heads, Dim: g.ValueDim, Places: p.pages.dealt}
	gather := gathering{qkv: *qkv}
	ready := func(i int, sub *queue.Submission) error {
		mine, err := gather.ready(sub, lead, c, i)
		if err != nil {
			return err
		}
		w, err := p.readyApart(sub, c, i, mine, 0, c.rows.outShape(g.ValueDim), c.rows.lseShape())
		if err != nil {
			return err
		}
		have := p.now.states(i)
		b, err := sub.Use(have.memory, have.generation)
		if err != nil {
			return err
		}
		put := func(list *[]ongpu.Mem, m ongpu.Mem) {
			if *list == nil {
				*list = make([]ongpu.Mem, n)
			}
			(*list)[i] = m
		}
		put(&merge.Y, w.o.Out)
		if c.lse {
			put(&merge.YLSE, w.o.LSE)
		}
		w.o.Out, w.o.LSE = have.parts.State(b, 0)
		put(&merge.Out, w.o.Out)
		put(&merge.LSE, w.o.LSE)
		if have.fresh != nil {
			fresh[i] = ongpu.AttentionOperands{Q: w.o.Q}
			fresh[i].Out, fresh[i].LSE = have.parts.State(b, have.parts.Count-1)
			put(&merge.Own, fresh[i].Out)
			put(&merge.OwnLSE, fresh[i].LSE)
		}
		works[i], states[i] = w, b
		return nil
	}
	err = lead.Queue.Submit(func(sub *queue.Submission) error {
		defer gather.free.All()
		// What waits for other members is queued when all of them have what is before it.
		if err := sub.Apart(ready, nothing); err != nil {
			return err
		}
		if err := gather.queue(sub, x); err != nil {
			return realigned(sub, x, err)
		}
		if err := sub.Apart(nothing, func(i int, sub *queue.Submission) error {
			w, have := &works[i], p.now.states(i)
			defer w.free.All()
			if err := sub.Do(func(s *cuda.Stream) error {
				if err := p.attendPart(s, i, c.node.layer, w.rows, &w.o); err != nil || have.fresh == nil {
					return err
				}
				return have.attendFresh(s, states[i], w.rows, &fresh[i])
			}); err != nil {
				return err
			}
			return ongpu.HaveRead(sub, w.reads...)
		}); err != nil {
			return err
		}
		if err := sub.Apart(nothing, func(i int, sub *queue.Submission) error {
			return sub.Do(func(s *cuda.Stream) error { return x.MergeParts(s, merge, i) })
		}); err != nil {
			return realigned(sub, x, err)
		}
		p.step.record(sub, c.node, p.now)
		return nil
	})
	if err != nil {
		return nil, nil, err
	}
	o, l := works[0].out, works[0].lse
	for i := range works[1:] {
		o.Replicas = append(o.Replicas, works[i+1].out)
		if c.lse {
			l.Replicas = append(l.Replicas, works[i+1].lse)
		}
	}
	if c.lse {
		return o.Value(), l.Value(), nil
	}
	return o.Value(), nil, nil
}

// realigned is why members could not all be given what they do together: some wait for others, who do not come.
func realigned(sub *queue.Submission, x exchanging, err error) error {
	if sub.Recording() {
		return err
	}
	if e := x.Realign(sub.Finish); e != nil {
		return errors.Join(err, e)
	}
	return err
}

// nothing is what is to be ready for work that has all it needs.
func nothing(int, *queue.Submission) error { return nil }

// gathering is how all members get queries, keys and values of which they have parts.
type gathering struct {
	qkv   deviceQKV
	lists []*decoder.AllGather
	reads [][]*ongpu.Tensor // of each member: its parts
	free  ongpu.Freeing     // what members' own queues hand out
}

// ready is what a member has, or will have: its parts' wholes are new.
func (g *gathering) ready(sub *queue.Submission, lead *ongpu.GPU, c *layerCall, member int) (mine deviceQKV, err error) {
	m, n, list := lead.Members[member], len(lead.Members), 0
	if g.reads == nil {
		g.reads = make([][]*ongpu.Tensor, n)
	}
	for i, d := range g.qkv {
		mine[i] = d.On(member)
		if d.Shards == nil {
			continue
		}
		whole, free, err := m.Scratch(sub, c.memory, c.memory.On(lead.Group, member).Input(i), d.DType, d.Shape)
		if err != nil {
			return mine, err
		}
		g.free = append(g.free, func() {
			if member == 0 {
				free()
				return
			}
			_ = m.Queue.Submit(func(*queue.Submission) error { free(); return nil })
		})
		if len(g.lists) <= list {
			o := &decoder.AllGather{Rows: d.Shape[0], X: make([]ongpu.Mem, n), Y: make([]ongpu.Mem, n)}
			for _, s := range d.Shards {
				o.Columns = append(o.Columns, s.Shape[1])
			}
			g.lists = append(g.lists, o)
		}
		o := g.lists[list]
		if o.X[member], err = mine[i].UseAs(sub, layerNames[i]); err != nil {
			return mine, err
		}
		if o.Y[member], err = whole.UseAs(sub, layerNames[i]); err != nil {
			return mine, err
		}
		g.reads[member], mine[i] = append(g.reads[member], mine[i]), whole
		list++
	}
	return mine, nil
}

// queue has members gather, behind ready.
func (g *gathering) queue(sub *queue.Submission, x exchanging) error {
	if len(g.lists) == 0 {
		return nil
	}
	return sub.Apart(nothing, func(i int, sub *queue.Submission) error {
		if err := sub.Do(func(s *cuda.Stream) error { return x.AllGathers(s, g.lists, i) }); err != nil {
			return err
		}
		return ongpu.HaveRead(sub, g.reads[i]...)
	})
}
