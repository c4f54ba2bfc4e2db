package attention

import (
	"cmp"
	"errors"
	"math"
	"math/bits"
	"slices"
	"sync"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/lean"
)

// Plan is the schedule of one step, for all its layers: on the host after Build, on the GPU after Upload. A plan may be
// built any number of times. Calls on one plan wait for each other.
type Plan struct {
	engine *Engine

	mu         sync.Mutex
	state      state
	least      Capacity // the argument of Reserve
	generation uint64
	form       form
	listed     []entries // see lists
	sched      lean.Plan
	sequences  int        // if the plan is blockwise, their number
	tiles      []int64    // scratch of Build
	covered    []bool     // scratch of Build
	ordered    []sequence // scratch of Build
	places     []uint64   // scratch of Build: sort keys and numbers of sequences in the last order of sortSequences
	unsorted   []sequence // scratch of Build
	into       []int      // slots of new tokens, during BuildPart; nil: new tokens are the last keys

	// Lists of every plan.
	works      list[work]
	seqs       sequences
	prefetches list[prefetch] // of each work, for the kernels for pages; empty if none may run
	masked     list[int32]    // rows that attend to no key: their number, and the rows
	slots      list[int32]    // of each token row, its row of keys in head 0; -1: none
	pages      list[int32]    // the block table, if the plan is paged
	ahead      list[int32]    // pages to bring into the L2 cache before attention runs: their number, and the pages

	// Parts of some plans, each with its lists: see lists.
	prefilled
	scored
	rotated
	written       written
	measured      measured
	prefixes      prefixes
	unfusedParams unfusedParams
	narrowed      narrowed

	reach     int  // extent of the sequences' rows of queries and outputs
	lastPage  int  // the highest page number
	mostSlots int  // largest number of used slots of a page
	liveKeys  int  // of all sequences: keys that some query attends to
	appends   bool // new tokens have slots in pages
	given     bool // the caller of BuildPart has given the slots

	outType   attn.DType // of the step's results, where launches write states
	fused     bool       // attention is a part of launches with other work
	memory    memory
	args      cuda.Args
	params    params
	recorded  bool // set by Recorded
	newRows   appendParams
	newValues appendParams // of values of another width than keys; else zero
	appended  Pages        // pages of the last Append since Build
	anyAppend bool
}

// lists returns the lists of the plan's table in order. Upload copies from the first to the last list that has entries,
// so lists that few plans have are at the ends.
func (p *Plan) lists() []entries {
	if p.listed == nil {
		own := []entries{&p.prefetches, &p.works, &p.seqs, &p.masked, &p.slots, &p.ahead, &p.pages}
		p.listed = slices.Concat(own, p.prefilled.lists(), p.scored.lists(), p.rotated.lists(), p.written.sections(), p.prefixes.lists())
	}
	return p.listed
}

// sequences are the sequences of a plan. On the GPU one sequence without queries follows the last.
type sequences struct{ list[sequence] }

func (l *sequences) bytes() []byte {
	l.data = append(l.data, sequence{})[:len(l.data)]
	return gpu.BytesOf(l.data[:len(l.data)+1])
}

// size sets the lengths of the lists of every plan.
func (p *Plan) size(need, least *Capacity) {
	blocks := p.engine.blocks
	p.prefetches.want(0, 0, blocks)
	p.works.want(0, 0, blocks)
	p.seqs.want(need.Sequences, least.Sequences, 1)
	p.masked.want(need.Rows, least.Rows, 1)
	p.slots.want(need.Rows, least.Rows, 0)
	p.ahead.want(0, 0, 1+mostAhead)
	p.pages.want(need.Pages, least.Pages, tableSlack)
}

// state is the progress of a plan.
type state uint8

const (
	fresh state = iota
	built
	uploaded
	closedPlan
)

// form is everything that a captured launch depends on. While the form is the same, the graph may be launched again.
type form struct {
	geometry attn.Problem
	idle     bool           // there are no rows, so no launches
	rows     int            // token rows
	tileRows int            // largest number of rows of an output tile
	paged    bool           // there is a block table
	kernel   *kernel        // decode or unfused kernel
	walks    bool           // it reads the first pages of its range from Plan.prefetches
	prefill  prefillKernels // prefill kernels that run in place of kernel
	both     bool           // prefill kernels run beside kernel, each for some sequences
	beside   bool           // beside another plan's launch, see Plan.beside
	sharing  sharing        // of prefixes
	chunks   int            // of keys, which measured sums of a row are of; 0: none
	spread   spreads        // of heads whose width no kernel has
	memory   uint64
}

// Capacity is the size of a step.
type Capacity struct {
	Sequences int // sequences with queries
	Rows      int // rows of queries and outputs
	Queries   int // of one sequence; 0: any
	Pages     int // live pages of all sequences
}

// queries returns the largest number of queries of a sequence.
func (c *Capacity) queries() int {
	if c.Queries > 0 {
		return min(c.Queries, c.Rows)
	}
	return c.Rows
}

// NewPlan returns an empty plan. Build allocates its GPU memory.
func (e *Engine) NewPlan() *Plan { return &Plan{engine: e} }

// Generation returns a number that changes when graphs that were captured before must not be launched any more: when
// Build or Reserve took new memory, or when the launches changed with the geometry, the number of token rows, the
// queries of a sequence, or the first block table.
func (p *Plan) Generation() uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.generation
}

// Reserve allocates for steps up to c, so that later Builds take no memory and keep the [Plan.Generation]. Call it
// before Build.
func (p *Plan) Reserve(c Capacity) error {
	const op = "reserve"
	if c.Sequences < 0 || c.Rows < 0 || c.Queries < 0 || c.Pages < 0 || max(c.Sequences, c.Rows, c.Queries, c.Pages) > math.MaxInt32 {
		return gpu.Errorf(op, attn.ErrShape, "capacity %+v: its numbers must be in [0, %d]", c, math.MaxInt32)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.usable(op); err != nil {
		return err
	}
	p.least, p.recorded = c, false
	return nil
}

// Recorded fixes, until Reserve, whether Builds share prefixes: later Builds share them if the last Build did. Call it
// when launches of the plan are in a recording. Sharing does not change results.
func (p *Plan) Recorded() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.recorded = true
}

func (p *Plan) usable(op string) error {
	if p.state == closedPlan || p.engine.closed.Load() {
		return gpu.Errorf(op, cuda.ErrClosed, "the plan")
	}
	return nil
}

// Build makes p the plan of one step: the LeanTiles of each thread block, the rows that attend to no key, and the slots
// of new tokens. Rows of queries and outputs are [0, rows). Rows without a sequence get zeros, and a log-sum-exp of
// -Inf. With rows 0 there are only the rows of sequences, and there is no Append.
//
// Build copies what it needs from its arguments. Everything is checked first. On error p is unchanged, except that
// after a failed allocation for prefixes p may have to be uploaded again. Errors wrap attn.ErrShape and attn.ErrPage,
// or are the driver's if memory is exhausted. Rows of different sequences must not overlap, which is not checked. Run
// checks the sizes of buffers.
func (p *Plan) Build(g attn.Problem, seqs []attn.Sequence, rows int) error {
	return p.BuildPart(g, seqs, rows, nil)
}

// BuildPart is Build for sequences with a part of their keys, which need not include the new tokens. slots has one
// number for each row: page*PageTokens + slot, the place where Append stores the new token, or -1 for none. No page may
// be written and also hold keys before a sequence's last Queries keys. If slots is nil, new tokens are the last keys.
func (p *Plan) BuildPart(g attn.Problem, seqs []attn.Sequence, rows int, slots []int) error {
	const op = "plan"
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.usable(op); err != nil {
		return err
	}
	if slots != nil && len(slots) != rows {
		return gpu.Errorf(op, attn.ErrShape, "%d slots for %d rows", len(slots), rows)
	}
	for i, slot := range slots {
		if slot < -1 || slot > math.MaxInt32 {
			return gpu.Errorf(op, attn.ErrShape, "row %d goes to slot %d", i, slot)
		}
	}
	g = g.Reduced()
	p.into = slots
	defer func() { p.into = nil }()
	if err := supports(op, &g, p.engine.kernels); err != nil {
		return err
	}
	all, results, shares := seqs, g, p.findPrefixes(&g, seqs, rows)
	if shares {
		g, seqs = ownProblem(&g), p.prefixes.own
	}
	own, most := g, spreadsIn(p.engine.kernels, &g) // most: of any step
	spread, wide := p.spreadsFor(&g, seqs), most.problem(g)
	g = spread.problem(g)
	form, need, who, err := p.choose(op, &g, seqs, rows)
	if err != nil {
		return err
	}
	form.spread = spread
	if err := p.engine.loadSpread(&spread); err != nil {
		return err
	}
	if err := p.engine.loadPrefill(op, &g, &form.prefill); err != nil {
		return err
	}
	if err := p.engine.load(form.kernel); err != nil {
		return err
	}
	if err := p.engine.loadRotary(&g); err != nil {
		return err
	}
	if err := p.engine.loadNarrow(&g); err != nil {
		return err
	}
	if err := p.engine.loadGrouped(&g); err != nil {
		return err
	}
	if err := p.engine.loadFour(&g); err != nil {
		return err
	}
	var scores int64
	if form.kernel.family == &unfusedFamily {
		if scores, err = p.scores(op, &g, need.scores); err != nil {
			return err
		}
	}
	least := p.least
	p.size(&need.Capacity, &least)
	p.scored.size(&g, &need, &least)
	p.rotated.size(&g, rows, least.Rows)
	p.written.size(p.engine, &g, &need, &least, who)
	parts := p.sizePrefill(&wide, who, &least)
	take := workspaceSize{tileRows: form.kernel.tileRows(g.Group(), max(need.Queries, least.Queries, least.queries())), dim: wide.ValueDim, scores: scores, parts: parts}
	if g.Invariant {
		take.states = max(p.engine.statesBytes(&g, need.tiles, need.longest, take.tileRows), p.engine.reserveStates(&g, &least, take.tileRows))
	}
	if restores(&g) {
		_, take.states = restoreBytes(&g, max(need.Rows, least.Rows))
	}
	if g.Measures {
		form.chunks, take.sums = p.sizeMeasured(&g, &need, &least, form.kernel)
	}
	take.spread = most.bytes(&wide, max(need.Rows, least.Rows))
	p.prefixes.size()
	if shares {
		form.sharing = p.layPrefixes(&results, &own, rows, form.kernel, who, &need, &least)
		take.states = form.sharing.states(own.Heads, own.Dim, own.ValueDim).end
	}
	if err := p.memory.reserve(p.engine, p.lists(), take); err != nil {
		return err
	}
	form.memory = p.memory.generation
	if shares {
		if err := p.buildPrefixes(&own, &form.sharing); err != nil {
			p.moved()
			return err
		}
	}

	p.given = slots != nil
	p.state, p.anyAppend, p.rotatedQ, p.lastPage = built, false, gpu.Memory{}, need.lastPage
	few := p.assign(&g, seqs, rows, &form, who)
	p.listSlopes(&g)
	p.cuts.data = append(p.cuts.data[:0], p.prefixes.cuts...)
	p.listPrefixes(all, &form.sharing)
	p.listPositions(&g, all, rows)
	p.prefetchPages(&g, form.walks)
	p.maskedRows(&g, few, rows)
	p.finishLists(&g)
	p.aheadPages(&g, form.paged)
	if form != p.form {
		p.form = form
		p.generation++
	}
	return nil
}

// choose checks a step of a problem that supports has checked, and returns its form, its size, and the division of sequences among kernels. It asks nothing of
// the GPU and writes only scratch.
func (p *Plan) choose(op string, g *attn.Problem, seqs []attn.Sequence, rows int) (form form, need stepSize, who division, err error) {
	if need, err = measure(op, g, seqs, rows); err != nil {
		return form, need, who, err
	}
	form.geometry, form.rows, form.idle, form.beside = *g, rows, rows == 0 && need.Rows == 0 && !p.steady, p.beside > 0
	group := g.Group()
	most := max(need.Queries, 1) * group
	if p.steady || p.beside > 0 {
		most = max(most, prefillRows) // the plan's launches may need a prefill kernel without sequences for it
	}
	who = p.divide(g, seqs, p.engine.findPrefill(g, most))
	form.prefill, form.both = who.prefillKernels, who.few > 0
	queries := max(need.Queries, p.least.Queries)
	if form.both {
		queries = who.queries
	}
	form.paged = need.Pages > need.Sequences || p.least.Pages > p.least.Sequences || need.splits
	shape := p.engine.shape(g.Pages.Planes[0].DType, g.Dim)
	block := BlockRows
	if g.Pages.InKeys() || isAny(g) {
		block = mostBlockRows
	}
	w := want{problem: g, features: g.Features(), rows: rowsOf(block, group, queries), pages: shape.pages(form.paged, g.PageTokens)}
	// With one row, the number of scores is the number of keys.
	w.long = p.engine.anyRow || 2*need.scores*int64(g.Dim*g.Pages.Planes[0].DType.Size()) >= longReads*int64(p.engine.blocks)
	if g.Variant != nil {
		if err = p.engine.printAll(op, g, form.prefill.taken(g, false), p.engine.find(&w)); err != nil {
			return form, need, who, err
		}
	}
	if form.kernel, err = p.engine.kernel(op, &w); err != nil {
		return form, need, who, err
	}
	form.tileRows = form.kernel.tileRows(group, queries)
	form.walks = form.kernel.paged || form.kernel.pages && p.engine.hasEpilogue() && w.walks()
	return form, need, who, nil
}

// assign gives thread blocks the LeanTiles and output tiles of a step that choose returned. It returns the number of
// sequences that the decode kernel attends to if both kinds of kernels run, and else of all sequences.
func (p *Plan) assign(g *attn.Problem, seqs []attn.Sequence, rows int, form *form, who division) (few int) {
	p.pack(g, seqs, rows, form.paged, who.queries)
	few, workers := len(p.seqs.data), p.engine.blocks // of the decode kernel
	if form.both {
		few, workers = who.few, workers-who.blocks
	}
	workers -= p.prefixes.blocks
	if p.uncut && form.prefill.precise != nil && !form.both {
		few = 0 // prefill kernels take operands of any type
	}
	p.schedule(g, p.seqs.data[:few], workers, form.paged, form.kernel.blockRows())
	p.listPrefill(g, who)
	if hides(g) && who.first() != nil {
		p.written.listPrompts(p.seqs.data)
	}
	return few
}

// stepSize is the size of a step, as measure returns it.
type stepSize struct {
	Capacity
	trees    int   // tokens of trees
	splits   bool  // some sequence has more than one page
	lastPage int   // the highest page number, or -1
	scores   int64 // of all heads
	tiles    int64 // upper bound of the LeanTiles of all output tiles of BlockRows rows
	longest  int64 // of one output tile
	blocks   int64 // of BlockRows rows
}

// measure checks the sequences and returns the step's size.
func measure(op string, g *attn.Problem, seqs []attn.Sequence, rows int) (m stepSize, err error) {
	if rows < 0 || rows > math.MaxInt32 {
		return m, gpu.Errorf(op, attn.ErrShape, "%d rows", rows)
	}
	m.Rows, m.lastPage = rows, -1
	group, tile := g.Group(), bits.TrailingZeros(uint(tileTokens(g)))
	mostQueries, biased := mostPackedRows/group, g.Bias != (attn.Bias{})
	for i := range seqs {
		q := &seqs[i]
		if q.Row < 0 || q.Queries < 0 || q.Keys < 0 || q.Row > math.MaxInt32-q.Queries || q.Keys > mostKeyRows {
			return m, gpu.Errorf(op, attn.ErrShape, "sequence %d has row %d, %d queries, %d keys", i, q.Row, q.Queries, q.Keys)
		}
		if q.Queries == 0 {
			continue
		}
		if q.Queries > mostQueries {
			return m, gpu.Errorf(op, attn.ErrShape, "sequence %d has %d queries of %d heads for each KV head: together more than %d", i, q.Queries, group, mostPackedRows)
		}
		if rows > 0 && q.Row+q.Queries > rows {
			return m, gpu.Errorf(op, attn.ErrShape, "sequence %d has rows [%d,%d) of %d", i, q.Row, q.Row+q.Queries, rows)
		}
		live := attn.Ceil(q.Keys, g.PageTokens)
		if len(q.Pages) < live {
			return m, gpu.Errorf(op, attn.ErrPage, "sequence %d has %d pages of %d tokens for %d keys", i, len(q.Pages), g.PageTokens, q.Keys)
		}
		last := attn.Highest(q.Pages[:live]) // a negative page is greater than all others as uint32
		if last > math.MaxInt32 {
			j := slices.IndexFunc(q.Pages[:live], func(page int32) bool { return page < 0 })
			return m, gpu.Errorf(op, attn.ErrPage, "sequence %d names page %d at %d", i, q.Pages[j], j)
		}
		if live > 0 {
			m.lastPage = max(m.lastPage, int(last))
		}
		if q.Tree != nil {
			if err := q.CheckTree(op, i, g.Mask); err != nil {
				return m, err
			}
			m.trees += len(q.Tree)
		}
		if biased && !g.Bias.Covers(i, q.Queries, q.Keys) {
			return m, gpu.Errorf(op, attn.ErrShape, "sequence %d has %d queries and %d keys, the bias is of %d sequences, %d queries and %d keys",
				i, q.Queries, q.Keys, g.Bias.Sequences, g.Bias.Queries, g.Bias.Keys)
		}
		m.Sequences++
		m.scores += int64(q.Queries) * int64(q.Keys) * int64(g.Heads)
		m.Rows = max(m.Rows, q.Row+q.Queries)
		m.Queries = max(m.Queries, q.Queries)
		m.Pages += live
		m.splits = m.splits || live > 1
		tiles := int64((q.Keys + 1<<tile - 1) >> tile)
		m.longest = max(m.longest, tiles)
		blocks := int64(attn.Ceil(q.Queries*group, BlockRows))
		m.blocks += blocks
		m.tiles += blocks * tiles * int64(g.KVHeads)
		if m.Pages > math.MaxInt32 || m.tiles > math.MaxInt32 {
			return m, gpu.Errorf(op, attn.ErrShape, "%d pages, %d LeanTiles: too many for one launch", m.Pages, m.tiles)
		}
	}
	return m, nil
}

// pack writes the sequences, the block table and the slots of new tokens. Sequences of at most `queries` queries come
// first.
func (p *Plan) pack(g *attn.Problem, seqs []attn.Sequence, rows int, paged bool, queries int) {
	p.seqs.data, p.pages.data, p.slots.data, p.numbers = p.seqs.data[:0], p.pages.data[:0], p.slots.data[:0], p.numbers[:0]
	p.reach, p.mostSlots, p.liveKeys, p.appends = rows, 0, 0, rows > 0 && p.into == nil
	for range rows {
		p.slots.data = append(p.slots.data, -1)
	}
	pageRows, detailed := int64(g.Pages.Planes[0].At.Page/g.Pages.Key().Elements()), hasDetails(g)
	for i := range seqs {
		q := &seqs[i]
		if q.Queries == 0 {
			continue // kernels require that every sequence has rows
		}
		s := sequence{row: int32(q.Row), queries: int32(q.Queries), keys: int32(q.Keys)}
		live := q.Pages[:attn.Ceil(q.Keys, g.PageTokens)]
		if paged {
			s.pages = int32(len(p.pages.data))
			p.pages.data = append(p.pages.data, live...)
		} else if len(live) > 0 {
			s.pages = live[0]
		}
		if p.seqs.data = append(p.seqs.data, s); detailed {
			p.numbers = append(p.numbers, numbered{s, int32(i)})
		}
		p.mostSlots = max(p.mostSlots, min(q.Keys, g.PageTokens))
		p.reach = max(p.reach, q.Row+q.Queries)
		first, _ := q.Narrowed(g.Mask).Keys(q.Queries, q.Keys, 0)
		p.liveKeys += q.Keys - first + g.SinkKeys(first)
		p.appends = p.appends && q.Keys >= q.Queries
		if !p.appends {
			continue
		}
		at, slot := len(live)-1, q.Keys-(len(live)-1)*g.PageTokens // after the last token
		for t := q.Queries - 1; t >= 0; t-- {
			if slot == 0 {
				at, slot = at-1, g.PageTokens
			}
			slot--
			// If the row exceeds 32 bits, so do the buffer's rows, and Append refuses the buffer.
			p.slots.data[q.Row+t] = int32(int64(live[at])*pageRows + int64(slot))
		}
	}
	p.sortSequences(p.seqs.data, queries)
	p.listDetails(g, seqs, queries)
	p.packSlots(g, pageRows)
}

// packSlots writes the slots of new tokens that BuildPart got, in pages of pageRows rows of keys.
func (p *Plan) packSlots(g *attn.Problem, pageRows int64) {
	if p.into == nil {
		return
	}
	p.appends = len(p.into) > 0
	for i, slot := range p.into {
		if p.slots.data[i] = -1; slot >= 0 {
			page := slot / g.PageTokens
			p.slots.data[i] = int32(int64(page)*pageRows + int64(slot%g.PageTokens))
			p.lastPage, p.mostSlots = max(p.lastPage, page), g.PageTokens
		}
	}
}

// sortSequences puts sequences of at most `queries` queries before the others, and in each group short ones last: whole
// output tiles come from there.
func (p *Plan) sortSequences(seqs []sequence, queries int) {
	if len(p.places) != len(seqs) {
		p.places = p.places[:0]
		for i := range seqs {
			p.places = append(p.places, uint64(i))
		}
	}
	// In the last order: for the next token it mostly still holds, and there is nothing to sort.
	sorted, last := true, uint64(0)
	for at, x := range p.places {
		i := uint32(x)
		now := uint64(seqs[i].place(queries))<<32 | uint64(i)
		sorted, last, p.places[at] = sorted && last <= now, now, now
	}
	if !sorted {
		slices.Sort(p.places)
	}
	p.unsorted = append(p.unsorted[:0], seqs...)
	rising := true // the given rows ascend
	for at, x := range p.places {
		rising = rising && (at == 0 || p.unsorted[at-1].row < p.unsorted[at].row)
		seqs[at] = p.unsorted[uint32(x)]
	}
	if rising {
		return // sequences of equal place are in order of their rows
	}
	for at := 0; at < len(seqs); {
		end := at + 1
		for end < len(seqs) && p.places[end]>>32 == p.places[at]>>32 {
			end++
		}
		if same := seqs[at:end]; len(same) > 1 {
			slices.SortFunc(same, func(a, b sequence) int { return inOrder(a, b, queries) })
		}
		at = end
	}
}

// inOrder compares two sequences in sortSequences' order. The order is total, since no two sequences have the same
// rows.
func inOrder(a, b sequence, queries int) int {
	return cmp.Or(cmp.Compare(a.place(queries), b.place(queries)), cmp.Compare(a.row, b.row), cmp.Compare(a.queries, b.queries))
}

// maskedRows lists the rows that attend to no key: those of the first `sequences` sequences, and those without a
// sequence. No thread block visits these rows.
func (p *Plan) maskedRows(g *attn.Problem, sequences, rows int) {
	p.masked.data = append(p.masked.data[:0], 0)
	covers := 0 // rows
	for n := range p.seqs.data {
		s := &p.seqs.data[n]
		covers += int(s.queries)
		if n >= sequences || g.Window == 0 && s.keys > 0 && s.keys >= s.queries {
			continue // prefill kernels visit all rows; each row attends to its own key at least
		}
		mask := p.prefixes.cuts.mask(g, s)
		for i := range s.queries {
			if first, end := mask.Keys(int(s.queries), int(s.keys), int(i)); first < end {
				break // later rows attend to a key, too
			}
			p.masked.data = append(p.masked.data, s.row+i)
		}
	}
	if covers < rows {
		p.covered = append(p.covered[:0], make([]bool, rows)...)
		for n := range p.seqs.data {
			s := &p.seqs.data[n]
			for i := s.row; i < s.row+s.queries; i++ {
				p.covered[i] = true
			}
		}
		for i, covered := range p.covered {
			if !covered {
				p.masked.data = append(p.masked.data, int32(i))
			}
		}
	}
	p.masked.data[0] = int32(len(p.masked.data) - 1)
}

// prefetchPages lists the first pages of each work, if its kernel reads that list.
func (p *Plan) prefetchPages(g *attn.Problem, walks bool) {
	p.prefetches.data = p.prefetches.data[:0]
	if walks {
		p.prefetches.data = slices.Grow(p.prefetches.data, len(p.works.data))[:len(p.works.data)]
		packPrefetches(p.works.data, g, p.prefixes.cuts, p.engine.shape(g.Pages.Planes[0].DType, g.Dim).keys, p.pages.data, p.prefetches.data)
	}
}

// mostAhead is the largest number of pages that are brought into the L2 cache before attention.
const mostAhead = 255

// pageBytes returns the size of a page's keys, or values. It returns 0 if the distance of two pages differs from that
// size, or the size is large, or values lie in keys or have another width.
func pageBytes(g *attn.Problem) int {
	if n := g.PageTokens * g.KVHeads * g.Dim; g.Pages.KeyDim() == g.Pages.Value.Dim && n == g.Pages.Planes[0].At.Page && n < 1<<26 && !g.Pages.InKeys() {
		return n * g.Pages.Planes[0].DType.Size()
	}
	return 0
}

// aheadBytes returns the number of bytes to bring into the L2 cache before attention: at most a third of the cache,
// since more would evict other data, and at most a third of the weights that make queries, keys and values of such
// width. The launch that reads those weights brings the pages, and has to wait for them.
func (e *Engine) aheadBytes(g *attn.Problem) int {
	width := g.Heads * g.Dim
	weights := 2 * width * (width + 2*g.KVHeads*g.Dim)
	return min(e.info.L2Bytes, weights) / 3
}

// aheadPages picks full pages evenly over all sequences, so that each thread block finds equally much in the cache. It
// picks at most a quarter of them.
func (p *Plan) aheadPages(g *attn.Problem, paged bool) {
	p.ahead.data = append(p.ahead.data[:0], 0)
	full, tokens := 0, int32(min(g.PageTokens, math.MaxInt32)) // no sequence has more keys
	for i := range p.seqs.data {
		full += int(p.seqs.data[i].keys / tokens)
	}
	size := 2 * pageBytes(g)
	if !paged || size == 0 || full == 0 || g.Window != 0 { // with a window few pages are read
		return
	}
	n := min(full/4, p.engine.aheadBytes(g)/size, mostAhead)
	before, next := 0, 0 // full pages of earlier sequences, and the number of picked pages
	for i := range p.seqs.data {
		if next == n {
			break
		}
		s := &p.seqs.data[i]
		here := int(s.keys / tokens)
		for ; next < n; next++ {
			at := (2*next+1)*full/(2*n) - before
			if at >= here {
				break
			}
			p.ahead.data = append(p.ahead.data, p.pages.data[int(s.pages)+at])
		}
		before += here
	}
	p.ahead.data[0] = int32(next)
}

// Upload queues the copy of a built plan. Work that was queued before may still use the plan's previous content.
func (p *Plan) Upload(s *cuda.Stream) error {
	const op = "upload"
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.usable(op); err != nil {
		return err
	}
	if p.state == fresh {
		return gpu.Errorf(op, gpu.ErrState, "the plan was not built")
	}
	p.state = built
	if err := p.memory.upload(s, p); err != nil {
		return err
	}
	if p.form.sharing.on() && p.prefixes.plan.state != uploaded {
		if err := p.prefixes.plan.Upload(s); err != nil {
			return err
		}
	}
	p.state = uploaded
	return nil
}

// Close frees the plan's memory, after the queued work that uses it.
func (p *Plan) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.state == closedPlan {
		return gpu.Errorf("close", cuda.ErrClosed, "the plan")
	}
	p.state = closedPlan
	err := p.memory.close()
	if p.prefixes.plan != nil {
		err = errors.Join(err, p.prefixes.plan.Close())
	}
	return err
}
