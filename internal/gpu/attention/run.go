package attention

import (
	"math"
	"math/bits"
	"slices"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/lean"
	"gorgonia.org/leanattention/internal/variant"
)

// Operands is the memory of one attention. Its layout is:
//
//   - Q and Out: the geometry's strides, from element 0 on.
//   - LSE: float32, in the geometry's strides. Without a buffer it is not written.
//   - Pages: all pages, in the geometry's strides.
//   - Bias: the numbers that the geometry's Bias places. No buffer without a bias.
//   - Sinks: a float32 for each query head, aligned to 4 bytes, if the geometry has Sinks.
//   - Tensors: those of the geometry's Variant.
//   - Entropy: as LSE, if the geometry Measures. Mass: as LSE, Places numbers for each. Without buffers they are not written.
type Operands struct {
	Q, Out, LSE, Bias, Sinks gpu.Memory
	Pages                    Pages
	Tensors                  [variant.MaxTensors]Tensor
	Entropy, Mass            gpu.Memory
	Places                   int
}

// Pages is the memory of a layer's keys and values.
type Pages = attn.Memory[gpu.Memory]

// Lay changes the strides of queries, outputs and log-sum-exps of the work that is queued from now on. The plan is then
// the same as after a Build with these strides.
func (p *Plan) Lay(query, out, lse attn.Strides) {
	p.mu.Lock()
	defer p.mu.Unlock()
	g, share := &p.form.geometry, &p.form.sharing
	queries, outputs := &g.Query, &g.Out
	if of := &p.form.spread; of.on() {
		queries, outputs = &of.query, &of.out
	}
	*queries = query
	if !share.on() {
		*outputs, g.LSE = out, lse
		return
	}
	share.out, share.lse = out, lse // the merge writes the results
	if p.prefixes.direct {
		p.prefixes.plan.form.geometry.Query = query
	}
}

// ready returns an error if p is not uploaded.
func (p *Plan) ready(op string) error {
	if err := p.usable(op); err != nil {
		return err
	}
	if p.state != uploaded {
		return gpu.Errorf(op, gpu.ErrState, "the plan was not uploaded")
	}
	return nil
}

// checkPages returns an error if the memory does not hold the plan's pages.
func (p *Plan) checkPages(op string, pages *Pages) error {
	g := &p.form.geometry
	k, v := &pages[0].Data, &pages[g.Pages.Value.Plane].Data
	need, needV := 0, 0
	if p.lastPage >= 0 {
		need = g.Pages.Planes[0].At.Extent(p.lastPage+1, g.KVHeads, p.mostSlots, g.Pages.Planes[0].Elements())
		needV = g.Pages.ValuePlane().At.Extent(p.lastPage+1, g.KVHeads, p.mostSlots, g.Pages.ValuePlane().Elements())
	}
	if rows := max(k.Len/g.Pages.Key().Elements(), v.Len/g.Pages.ValuePlane().Elements()); rows > mostKeyRows {
		return gpu.Errorf(op, attn.ErrShape, "%d rows of keys; kernels support %d", rows, mostKeyRows)
	}
	if err := k.CheckStored(op, "k", need); err != nil {
		return err
	}
	if err := v.CheckStored(op, "v", needV); err != nil {
		return err
	}
	if err := p.checkScales(op, pages); err != nil {
		return err
	}
	if k.DType != g.Pages.Planes[0].DType || v.DType != g.Pages.Planes[0].DType {
		return gpu.Errorf(op, attn.ErrDType, "k is %v, v is %v, the plan is for %v", k.DType, v.DType, g.Pages.Planes[0].DType)
	}
	return nil
}

// Run queues attention of one layer:
//
//	out = softmax(scale * q K^T) V,   lse = ln sum e^(scale * q K^T)
//
// Everything is checked first. Errors wrap attn.ErrShape, attn.ErrDType, ErrState,
// or are the driver's.
func (p *Plan) Run(s *cuda.Stream, o *Operands) error {
	const op = "run"
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.ready(op); err != nil {
		return err
	}
	if p.form.idle {
		return nil
	}
	if err := p.checkOperands(op, o); err != nil {
		return err
	}
	if p.form.sharing.on() {
		return p.runSharing(s, o)
	}
	if kv := o.Pages[0].Data.DType; p.form.spread.on() {
		if k := p.directKernel(o.Q.DType == kv && o.Out.DType == kv); k != nil {
			return k.family.run(p, s, o, k)
		}
	}
	return p.attend(s, o, p.kernelOf(o, false))
}

// launch queues k, after the decode kernel if both run. Operands have been checked.
func (p *Plan) launch(s *cuda.Stream, o *Operands, k *kernel) error {
	if few := p.form.kernel; p.form.both {
		if err := few.family.run(p, s, o, few); err != nil {
			return err
		}
	}
	return k.family.run(p, s, o, k)
}

// kernelOf returns the kernel for operands of a step, which runs beside form.kernel if both run. states: the launch writes
// states of a merge in place of outputs.
func (p *Plan) kernelOf(o *Operands, states bool) *kernel {
	kv := o.Pages[0].Data.DType
	if k := p.form.prefill.of(o.Q.DType == kv && o.Out.DType == kv, p.form.geometry.Mixed, states); k != nil {
		return k
	}
	return p.form.kernel
}

// Kernels returns the entry points of attention that Run launches, if operands have the types of the problem.
func (p *Plan) Kernels() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	g := &p.form.geometry
	if !p.form.sharing.on() {
		return p.entries(g, false)
	}
	return slices.Concat([]string{gatherEntry}, p.entries(g, true), p.prefixes.plan.entries(g, true), []string{mergeEntry})
}

// entries returns the entry points that launch queues.
func (p *Plan) entries(g *attn.Problem, states bool) []string {
	few, many := p.form.kernel, p.form.prefill.taken(g, states)
	if k := p.directKernel(g.QueryType == g.Pages.Planes[0].DType); k != nil {
		many = k
	}
	switch {
	case few == nil:
		return nil
	case many == nil:
		return few.entries
	case p.form.both:
		return append(few.entries[:1:1], many.entries[0])
	}
	return many.entries
}

// runDecode queues attention by blocks that have ranges of LeanTiles.
func (p *Plan) runDecode(s *cuda.Stream, o *Operands, k *kernel) error {
	if k.needs&attn.Varied != 0 {
		return p.runWritten(s, o, k)
	}
	grid, err := p.arguments(o)
	if err != nil {
		return err
	}
	if k.measures {
		return p.runMeasured(s, o, k, grid)
	}
	if a := &p.params; k.scored {
		p.scoredParams = scoredParams{keyMap: a.keyMap, valueMap: a.valueMap, Params: a.Params, meet: a.meet, score: p.scoresOf(&p.form.geometry, o, k)}
		if p.form.walks {
			p.scoredParams.prefetched = a.prefetched
		}
		p.args.Reset()
		cuda.Struct(&p.args, &p.scoredParams)
		p.hold(o)
	}
	return k.functions[0].Launch(s, grid, &p.args)
}

// checkOperands returns an error if the plan is not for the operands.
func (p *Plan) checkOperands(op string, o *Operands) error {
	if err := p.checkLaid(op, o); err != nil {
		return err
	}
	if rotates(&p.form.geometry) && o.Q != p.rotatedQ {
		return gpu.Errorf(op, gpu.ErrState, "q is not what AppendRotated has made")
	}
	return nil
}

// checkLaid is checkOperands without the check that queries are rotated.
func (p *Plan) checkLaid(op string, o *Operands) error {
	g := &p.form.geometry
	out, lse := g.Out, g.LSE
	if of := &p.form.spread; of.on() {
		out = of.out
	}
	if share := &p.form.sharing; share.on() {
		out, lse = share.out, share.lse
	}
	if err := p.checkPages(op, &o.Pages); err != nil {
		return err
	}
	query := p.form.spread.queries(g)
	if err := o.Q.Check(op, "q", query.Extent(p.reach, g.Heads, g.Pages.KeyDim())); err != nil {
		return err
	}
	if err := o.Out.Check(op, "out", out.Extent(p.reach, g.Heads, g.Pages.Value.Dim)); err != nil {
		return err
	}
	if g.Bias != (attn.Bias{}) {
		if !gpu.IsTensor(o.Bias.DType) {
			return gpu.Errorf(op, attn.ErrDType, "the bias is %v", o.Bias.DType)
		}
		if err := o.Bias.Check(op, "the bias", g.Bias.Size()); err != nil {
			return err
		}
	}
	if g.Sinks {
		if o.Sinks.DType != attn.Float32 {
			return gpu.Errorf(op, attn.ErrDType, "sinks are %v; they must be %v", o.Sinks.DType, attn.Float32)
		}
		if err := o.Sinks.CheckLoose(op, "sinks", g.Heads); err != nil {
			return err
		}
	}
	if err := p.checkTensors(op, o); err != nil {
		return err
	}
	if err := p.checkMeasured(op, o); err != nil {
		return err
	}
	if o.LSE.Buffer == nil {
		return nil
	}
	if o.LSE.DType != attn.Float32 {
		return gpu.Errorf(op, attn.ErrDType, "lse is %v; it must be %v", o.LSE.DType, attn.Float32)
	}
	return o.LSE.CheckLoose(op, "lse", lse.Extent(p.reach, g.Heads, 1))
}

// arguments fills the arguments of runDecode's launch from checked operands.
func (p *Plan) arguments(o *Operands) (grid cuda.Grid, err error) {
	e, g := p.engine, &p.form.geometry
	shape := e.shapeOf(p.form.kernel, g.Dim)
	c, _ := e.configure(shape, p.form.kernel.configured(p.form.tileRows)) // choose has found the configuration
	a := &p.params
	box := boxOf(shape.keys, p.form.paged || isFour(g), g.PageTokens)
	if e.hasCopyEngine() && !isFour(g) && !p.form.kernel.packed {
		key, value := p.form.spread.rows(g)
		if a.keyMap, err = e.tensorMap(&o.Pages[0].Data, &shape, key, box); err != nil {
			return grid, err
		}
		if a.valueMap, err = e.tensorMap(&o.Pages[1].Data, &shape, value, box); err != nil {
			return grid, err
		}
	}
	p.fill(o, &shape, &c, box)
	p.args.Reset()
	cuda.Struct(&p.args, a)
	p.hold(o)
	return cuda.Grid{Blocks: [3]int{e.blocks}, Threads: [3]int{c.threads}, Shared: c.shared, Overlap: e.hasCopyEngine()}, nil
}

// hold keeps the buffers of an attention launch alive.
func (p *Plan) hold(o *Operands) {
	for _, b := range [...]*cuda.Buffer{o.Pages[0].Data.Buffer, o.Pages[1].Data.Buffer, o.Pages[0].Scales.Buffer, o.Pages[1].Scales.Buffer, o.Q.Buffer, o.Out.Buffer, o.LSE.Buffer, o.Bias.Buffer, o.Sinks.Buffer, p.memory.table, p.memory.partials, p.memory.counters, p.memory.tagged, p.memory.runs, p.memory.scores, p.memory.parts, p.memory.states, p.memory.sums, o.Entropy.Buffer, o.Mass.Buffer} {
		if b != nil {
			p.args.Hold(b)
		}
	}
	for i := range o.Tensors {
		if b := o.Tensors[i].Memory.Buffer; b != nil {
			p.args.Hold(b)
		}
	}
}

// streams reports whether the step's keys and values don't fit in the L2 cache.
func (p *Plan) streams(g *attn.Problem) bool {
	return p.liveKeys*g.KVHeads*tokenBytes(g) > p.engine.info.L2Bytes/2
}

// fill writes the kernels' parameters, except the tensor maps.
func (p *Plan) fill(o *Operands, s *shape, c *config, box int) {
	a, g, m := &p.params, &p.form.geometry, &p.memory
	a.keys, a.values, a.query, a.out, a.lse = o.Pages[0].Data.Address(), o.Pages[g.Pages.Value.Plane].Data.Address(), o.Q.Address(), o.Out.Address(), 0
	if o.LSE.Buffer != nil {
		a.lse = o.LSE.Address()
	}
	a.Work, a.seqs, a.Masked, a.pages = p.works.address(m), p.seqs.address(m), p.masked.address(m), 0
	if p.form.paged {
		a.pages = p.pages.address(m)
	}
	a.prefetched = p.prefetches.address(m)
	a.partials, a.counters = m.partials.Address(), m.counters.Address()
	if g.Invariant {
		a.partials = m.states.Address()
	}
	if m.tagged != nil {
		a.meet = meetParams{tagged: m.tagged.Address(), runs: m.runs.Address(), count: int32(m.tagged.Len() / 8)}
	}
	a.queryRow, a.queryHead = int64(g.Query.Row), int64(g.Query.Head)
	a.outRow, a.outHead = int64(g.Out.Row), int64(g.Out.Head)
	a.lseRow, a.lseHead = int64(g.LSE.Row), int64(g.LSE.Head)
	a.pageRows, a.headRows, a.pageTokens = int32(g.Pages.Planes[0].At.Page/g.Pages.Key().Elements()), int32(g.Pages.Planes[0].At.Head/g.Pages.Key().Elements()), int32(g.PageTokens)
	group := g.Group()
	a.heads, a.group = int32(g.KVHeads), int32(group)
	a.tileShift = int32(bits.TrailingZeros(uint(tileTokens(g) / s.keys)))
	a.box, a.Rows = int32(box), int32(p.form.tileRows)
	a.warps, a.Slots, a.buffers, a.parts = int32(c.warps), int32(c.slots), int32(c.buffers), int32(c.parts)
	a.Causal, a.early, a.streamed = 0, 0, 0
	if g.Causal {
		a.Causal = 1
	}
	if p.anyAppend && p.appended == o.Pages {
		a.early = 1
	}
	if p.streams(g) {
		a.streamed = 1
	}
	a.queryType, a.outType = gpu.Code(o.Q.DType), gpu.Code(o.Out.DType)
	a.scale, a.perGroup = float32(g.Scale*lean.Log4E), 1/float32(group)
}

// Append queues the storing of one layer's new keys and values into the slots of their sequences' last keys, or of
// BuildPart. The new keys and values are rows of all KV heads, one for each token, and are converted to the type of the
// pages. If values are in keys, newV is not read.
//
// Everything is checked first. Errors wrap attn.ErrShape, attn.ErrDType, ErrState,
// or are the driver's.
func (p *Plan) Append(s *cuda.Stream, to Pages, newK, newV gpu.Memory) error {
	return p.AppendRows(s, to, newK, newV, 0)
}

// AppendRows is Append from longer rows. Each row of the new keys and values has `heads` KV heads, and the plan's are
// the first of them. 0 means the plan's number.
func (p *Plan) AppendRows(s *cuda.Stream, to Pages, newK, newV gpu.Memory, heads int) error {
	const op = "append"
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.ready(op); err != nil {
		return err
	}
	if p.form.idle {
		return nil
	}
	if rotates(&p.form.geometry) {
		return gpu.Errorf(op, attn.ErrShape, "the problem has a rotary embedding: call AppendRotated")
	}
	if err := p.packAppend(op, &to, newK, newV, heads); err != nil {
		return err
	}
	if isCoded(&p.form.geometry) {
		return p.storeCoded(s, &to, &rotaryParams{Append: p.newRows}, newK.Buffer, newV.Buffer)
	}
	p.args.Reset()
	cuda.Struct(&p.args, &p.newRows)
	for _, b := range [...]*cuda.Buffer{to[0].Data.Buffer, to[p.form.geometry.Pages.Value.Plane].Data.Buffer, newK.Buffer, newV.Buffer, p.memory.table} {
		p.args.Hold(b)
	}
	if err := p.engine.append.Launch(s, p.appendGrid(), &p.args); err != nil {
		return err
	}
	if err := p.appendValues(s, &to, newV); err != nil {
		return err
	}
	p.stores(&to)
	return nil
}

func (p *Plan) appendGrid() cuda.Grid {
	return cuda.Grid{Blocks: [3]int{p.form.rows}, Threads: [3]int{appendThreads}, Overlap: p.engine.hasCopyEngine()}
}

// appendValues queues the storing of new values whose width is not that of keys: a launch stores rows of one width.
func (p *Plan) appendValues(s *cuda.Stream, to *Pages, newV gpu.Memory) error {
	if p.newValues == (appendParams{}) {
		return nil
	}
	p.args.Reset()
	cuda.Struct(&p.args, &p.newValues)
	for _, b := range [...]*cuda.Buffer{to[p.form.geometry.Pages.Value.Plane].Data.Buffer, newV.Buffer, p.memory.table} {
		p.args.Hold(b)
	}
	return p.engine.append.Launch(s, p.appendGrid(), &p.args)
}

// packAppend checks the arguments of AppendRows and writes its kernel's parameters, and those of appendValues.
func (p *Plan) packAppend(op string, to *Pages, newK, newV gpu.Memory, heads int) error {
	if !p.appends {
		return gpu.Errorf(op, attn.ErrShape, "the plan has %d token rows, or sequences with fewer keys than queries", p.form.rows)
	}
	g := &p.form.geometry
	if err := p.checkPages(op, to); err != nil {
		return err
	}
	k, v := &to[0].Data, &to[g.Pages.Value.Plane].Data
	if heads == 0 {
		heads = g.KVHeads
	}
	if heads < g.KVHeads || heads > math.MaxInt32/max(g.Dim, g.ValueDim) {
		return gpu.Errorf(op, attn.ErrShape, "%d KV heads in a row of new keys, the plan has %d", heads, g.KVHeads)
	}
	dim := g.Pages.KeyDim()
	extent := func(dim int) int { return ((p.form.rows-1)*heads + g.KVHeads) * dim }
	if err := newK.Check(op, "the new k", extent(dim)); err != nil {
		return err
	}
	p.newRows = appendParams{
		newKeys: newK.Address(), keys: k.Address(), slots: p.appending().Slots,
		headRows: int32(g.Pages.Planes[0].At.Head / g.Pages.Key().Elements()), heads: int32(g.KVHeads), dim: int32(dim),
		newType: gpu.Code(newK.DType), dtype: gpu.Code(k.DType), row: int32(heads * dim),
	}
	p.newValues = appendParams{}
	if g.Pages.InKeys() {
		return nil
	}
	if err := newV.Check(op, "the new v", extent(g.Pages.Value.Dim)); err != nil {
		return err
	}
	if newK.DType != newV.DType {
		return gpu.Errorf(op, attn.ErrDType, "the new k is %v, the new v %v", newK.DType, newV.DType)
	}
	if width := g.Pages.Value.Dim; width != dim {
		p.newValues = p.newRows
		p.newValues.newKeys, p.newValues.keys, p.newValues.dim, p.newValues.row = newV.Address(), v.Address(), int32(width), int32(heads*width)
		return nil
	}
	p.newRows.newValues, p.newRows.values = newV.Address(), v.Address()
	return nil
}

// stores notes that the step's new keys and values go to some pages. Attention to these pages may read older keys
// before the previous launch has ended.
func (p *Plan) stores(to *Pages) {
	p.appended, p.anyAppend = *to, true
	if p.form.sharing.on() {
		p.prefixes.plan.stores(to)
	}
}
