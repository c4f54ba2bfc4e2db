package attention

import (
	"errors"
	"math/bits"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
)

// memory is what a plan has on the GPU, and pinned memory on the way there. It
// grows and never shrinks.
type memory struct {
	generation uint64 // of the buffers
	capacity   Capacity
	table      *cuda.Buffer // sections one behind the other
	sections   sections
	staging    [stagings]staging // of one table each: while some are copied another one is written
	next       int               // the staging that is written next

	partials *cuda.Buffer // two for each thread block
	counters *cuda.Buffer // one for each thread block: zero, but while a launch runs
	tagged   *cuda.Buffer // partials as tagged words, where blocks merge together; nil: none do on this GPU
	runs     *cuda.Buffer // three numbers for each thread block: see Reduce::begin; nil as tagged
	scores   *cuda.Buffer // of unfused attention; nil as long as there was none
	parts    *cuda.Buffer // of output tiles of the kernels for many rows, behind counters, zero; nil as long as there were none
	states   *cuda.Buffer // where sequences share prefixes: see statesOf; or of LeanTiles, with batch invariance; nil as long as there were none
}

// buffers are all that there may be, in one order.
func (m *memory) buffers() [8]**cuda.Buffer {
	return [...]**cuda.Buffer{&m.table, &m.partials, &m.counters, &m.tagged, &m.runs, &m.scores, &m.parts, &m.states}
}

// stagings: a recording's copies count as made when its replay has ended, so that there
// is one for the replay that runs, one for the next, and one to write.
const stagings = 3

// staging is pinned memory.
type staging struct {
	host *cuda.Host
	done *cuda.Event // behind the copy
	busy bool        // a copy may be on its way
}

// wait waits until no copy uses s.
func (s *staging) wait() error {
	if !s.busy {
		return nil
	}
	if err := s.done.Synchronize(); err != nil {
		return err
	}
	s.busy = false
	return nil
}

// sections are where the parts of a table begin, in bytes.
type sections struct {
	prefetches, works, seqs, masked, slots, ahead, pages, prefillStarts, prefill, slopes, details, trees, positions int64
	gathered, mergeStarts, mergeSlots, mergeShifts, cuts                                                            int64
	end                                                                                                             int64
}

func (c Capacity) layOut(blocks int) (s sections) {
	const align = 64
	at := int64(0)
	next := func(n int, size uintptr) (start int64) {
		start = at
		at += (int64(n)*int64(size) + align - 1) / align * align
		return start
	}
	s.prefetches = next(blocks, unsafe.Sizeof(prefetch{})) // in front: a plan without it has nothing to copy there
	s.works = next(blocks, unsafe.Sizeof(work{}))
	s.seqs = next(c.Sequences+1, unsafe.Sizeof(sequence{})) // one without queries ends them
	s.masked = next(1+c.Rows, 4)
	s.slots = next(c.Rows, 4)
	s.ahead = next(1+mostAhead, 4)
	s.pages = next(c.Pages+tableSlack, 4)
	s.prefillStarts = next(mostTogether*blocks+1, 4)
	s.prefill = next(c.prefill, unsafe.Sizeof(prefillTile{})) // behind the others: few plans have it
	s.slopes = next(c.slopes, 4)
	s.details = next(c.details, unsafe.Sizeof(seqDetail{}))
	s.trees = next(c.trees, 8)
	s.positions = next(c.positions, 8)
	if c.gathered > 0 {
		s.gathered, s.mergeStarts, s.mergeSlots = next(1+c.gathered, 4), next(1+c.Rows, 4), next(c.gathered, 4)
		if c.slopes > 0 {
			s.mergeShifts = next(c.gathered, 4)
		}
		s.cuts = next(c.Rows, 4) // behind the others: few plans have windows
	}
	s.end = at
	return s
}

// holds says whether a step of size n fits.
func (c Capacity) holds(n Capacity) bool {
	return n.Sequences <= c.Sequences && n.Rows <= c.Rows && n.Pages <= c.Pages && n.prefill <= c.prefill && n.slopes <= c.slopes && n.details <= c.details && n.trees <= c.trees && n.positions <= c.positions && n.gathered <= c.gathered
}

// grown is a capacity for n that will do for a while.
func (c Capacity) grown(n, least Capacity) Capacity {
	return Capacity{
		Sequences: growth(c.Sequences, n.Sequences, least.Sequences),
		Rows:      growth(c.Rows, n.Rows, least.Rows),
		Pages:     growth(c.Pages, n.Pages, least.Pages),
		prefill:   growth(c.prefill, n.prefill, least.prefill),
		slopes:    max(c.slopes, n.slopes),
		details:   growth(c.details, n.details, least.details),
		trees:     growth(c.trees, n.trees, least.trees),
		positions: growth(c.positions, n.positions, least.positions),
		gathered:  growth(c.gathered, n.gathered, least.gathered),
	}
}

func growth(have, need, least int) int {
	if need <= have && least <= have {
		return have
	}
	return max(least, 1<<bits.Len(uint(max(need, 64)-1)))
}

// workspace is the bytes of what thread blocks of the kernels for few rows hand each other parts of output
// tiles through.
type workspace struct{ partials, counters, tagged, runs int64 }

// workspaceOf is that of output tiles of so many rows at most.
func (e *Engine) workspaceOf(tileRows, dim int) (w workspace) {
	w.partials = 2 * int64(e.blocks) * int64(tileRows) * int64(dim+2) * 4
	w.counters = int64(e.blocks) * 4
	if e.hasEpilogue() {
		w.tagged, w.runs = 2*w.partials, 3*int64(e.blocks)*4
	}
	return w
}

// mostStates is how many bytes of states are reserved for what may come: with more a plan has new memory.
const mostStates = 64 << 20

// statesBytes is the size of the workspace with batch invariance, for so many LeanTiles of which an output tile has so
// many at most: those of output tiles that several blocks have, and what blocks go on with. It is a power of two: contexts
// grow, and not each step is to have new memory.
func (e *Engine) statesBytes(g *attn.Problem, tiles, longest int64, tileRows int) int64 {
	shared := min(tiles, int64(e.blocks-1)*longest)
	return 1 << bits.Len64(uint64(int64(tileRows)*4*(int64(e.blocks)*int64(2*g.Dim)+shared*int64(g.Dim+4))-1))
}

// reserveStates is statesBytes of a step of capacity c.
func (e *Engine) reserveStates(g *attn.Problem, c *Capacity, tileRows int) int64 {
	blocks := attn.Ceil(attn.Product(c.queries(), g.Group()), BlockRows)
	longest := attn.Ceil(attn.Product(c.Pages, g.PageTokens), tileTokens(g)) + 1
	tiles := attn.Product(g.KVHeads, blocks, longest+c.Sequences)
	return min(e.statesBytes(g, int64(tiles), int64(longest), tileRows), mostStates)
}

// workspaceSize is what a step takes besides its table.
type workspaceSize struct {
	tileRows, dim int   // of output tiles of the kernels for few rows
	scores        int64 // numbers
	parts, states int64 // bytes
}

// reserve takes memory for a step. On error nothing has changed.
func (m *memory) reserve(e *Engine, op string, need, least Capacity, r workspaceSize) (err error) {
	var fresh []interface{ Close() error } // what this call made, should a later part of it fail
	defer func() {
		if err != nil {
			for _, x := range fresh {
				_ = x.Close() // the first error tells more
			}
		}
	}()
	next := *m
	size := e.workspaceOf(r.tileRows, r.dim)
	if m.partials == nil || m.partials.Len() < size.partials {
		if next.partials, err = e.dev.NewBuffer(size.partials); err != nil {
			return err
		}
		fresh = append(fresh, next.partials)
	}
	switch {
	case r.scores == 0:
		next.scores = nil // they may be much
	case m.scores == nil || m.scores.Len() < r.scores*4:
		if next.scores, err = e.dev.NewBuffer(r.scores * 4); err != nil {
			return err
		}
		fresh = append(fresh, next.scores)
	}
	zeros := func(b **cuda.Buffer, bytes int64) error { // no less than it was
		if *b != nil && (*b).Len() >= bytes {
			return nil
		}
		made, err := e.dev.NewBuffer(bytes)
		if err != nil {
			return err
		}
		fresh, *b = append(fresh, made), made
		return made.Set(0, 0, bytes)
	}
	if err = zeros(&next.counters, size.counters); err != nil {
		return err
	}
	if r.parts > 0 {
		if err = zeros(&next.parts, r.parts); err != nil {
			return err
		}
	}
	if r.states > 0 && (m.states == nil || m.states.Len() < r.states) {
		if next.states, err = e.dev.NewBuffer(r.states); err != nil {
			return err
		}
		fresh = append(fresh, next.states)
	}
	if e.hasEpilogue() {
		if err = zeros(&next.tagged, size.tagged); err != nil {
			return err
		}
		if err = zeros(&next.runs, size.runs); err != nil {
			return err
		}
	}
	if m.table == nil || !m.capacity.holds(need) || !m.capacity.holds(least) {
		// Pinned memory goes only when copies of it are done.
		for i := range m.staging {
			if err = m.staging[i].wait(); err != nil {
				return err
			}
		}
		next.capacity = m.capacity.grown(need, least)
		next.sections = next.capacity.layOut(e.blocks)
		if next.table, err = e.dev.NewBuffer(next.sections.end); err != nil {
			return err
		}
		fresh = append(fresh, next.table)
		for i := range next.staging {
			s := &next.staging[i]
			*s = staging{}
			if s.host, err = e.dev.NewHost(int(next.sections.end)); err != nil {
				return err
			}
			fresh = append(fresh, s.host)
			if s.done, err = e.uploads.NewEvent(false); err != nil {
				return err
			}
			fresh = append(fresh, s.done)
		}
	}
	if len(fresh) == 0 && next.scores == m.scores {
		return nil
	}
	old := *m
	*m = next
	m.generation++
	if old.table == m.table {
		old.staging = [stagings]staging{}
	}
	kept := m.buffers()
	for i, b := range old.buffers() {
		if *b == *kept[i] {
			*b = nil
		}
	}
	// The driver waits for queued work before it takes memory back. Should it
	// report the failure of something, so will the next call.
	_ = old.close()
	return nil
}

// noSequence is behind the last one.
var noSequence [1]sequence

// upload copies a plan's parts, by way of pinned memory that no copy reads.
func (m *memory) upload(s *cuda.Stream, p *Plan) error {
	to := &m.staging[m.next]
	if err := to.wait(); err != nil {
		return err
	}
	at := &m.sections
	begin, end := at.works, at.works
	if len(p.prefetches) > 0 {
		begin = at.prefetches
	}
	for _, part := range [...]struct {
		at   int64
		data []byte
	}{
		{at.prefetches, gpu.BytesOf(p.prefetches)},
		{at.works, gpu.BytesOf(p.works)},
		{at.seqs, gpu.BytesOf(p.seqs)},
		{at.seqs + int64(len(p.seqs))*int64(unsafe.Sizeof(noSequence[0])), gpu.BytesOf(noSequence[:])},
		{at.masked, gpu.BytesOf(p.masked)},
		{at.slots, gpu.BytesOf(p.slots)},
		{at.ahead, gpu.BytesOf(p.ahead)},
		{at.pages, gpu.BytesOf(p.pages)},
		{at.prefillStarts, gpu.BytesOf(p.prefillStarts)},
		{at.prefill, gpu.BytesOf(p.prefilling)},
		{at.slopes, gpu.BytesOf(p.slopes)},
		{at.details, gpu.BytesOf(p.details)},
		{at.trees, gpu.BytesOf(p.trees)},
		{at.positions, gpu.BytesOf(p.positions)},
		{at.gathered, gpu.BytesOf(p.prefixes.gathered)},
		{at.mergeStarts, gpu.BytesOf(p.prefixes.starts)},
		{at.mergeSlots, gpu.BytesOf(p.prefixes.slots)},
		{at.mergeShifts, gpu.BytesOf(p.prefixes.shifts)},
		{at.cuts, gpu.BytesOf(p.cuts)},
	} {
		if len(part.data) == 0 {
			continue
		}
		if err := to.host.Write(int(part.at), part.data); err != nil {
			return err
		}
		end = part.at + int64(len(part.data))
	}
	if err := s.Upload(m.table, begin, to.host, int(begin), int(end-begin)); err != nil {
		return err
	}
	to.busy = true
	m.next = (m.next + 1) % stagings
	if err := s.Record(to.done); err != nil {
		// The event tells nothing about the copy.
		if s.Synchronize() == nil {
			to.busy = false
		}
		return err
	}
	return nil
}

// close gives all of it back. What went with the device is gone already.
func (m *memory) close() error {
	var first error
	note := func(err error) {
		if err != nil && first == nil && !errors.Is(err, cuda.ErrClosed) {
			first = err
		}
	}
	for i := range m.staging {
		s := &m.staging[i]
		if s.host == nil {
			continue
		}
		note(s.wait())
		note(s.host.Close())
		note(s.done.Close())
	}
	for _, b := range m.buffers() {
		if *b != nil {
			note((*b).Close())
		}
	}
	*m = memory{}
	return first
}
