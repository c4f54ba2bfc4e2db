package attention

import (
	"errors"
	"math/bits"
	"slices"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
)

// memory is what a plan has on the GPU, and pinned memory on the way there. It
// grows and never shrinks.
type memory struct {
	generation uint64            // of the buffers
	table      *cuda.Buffer      // sections one behind the other
	staging    [stagings]staging // of one table each: while some are copied another one is written
	next       int               // the staging that is written next

	partials *cuda.Buffer // two for each thread block
	counters *cuda.Buffer // one for each thread block: zero, but while a launch runs
	tagged   *cuda.Buffer // partials as tagged words, where blocks merge together; nil: none do on this GPU
	runs     *cuda.Buffer // three numbers for each thread block: see Reduce::begin; nil as tagged
	scores   *cuda.Buffer // of unfused attention; nil as long as there was none
	parts    *cuda.Buffer // of output tiles of the prefill kernels, behind counters, zero; nil as long as there were none
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

// A section is a part of a plan's table. The part of the plan that a section belongs to declares it as a list, fills the list,
// and says how long it gets.
type section struct {
	need, least int   // entries of this step, and of steps that were announced
	extra       int   // entries behind those
	room        int   // entries that the table has room for, without extra
	at          int64 // where the section begins in the table, in bytes
}

// want says for how many entries there must be room: of this step, of steps that were announced, and behind either.
func (s *section) want(need, least, extra int) { s.need, s.least, s.extra = need, least, extra }

// fits says whether there is room already.
func (s *section) fits() bool { return max(s.need, s.least) <= s.room }

// A list is a section's entries.
type list[T any] struct {
	data []T // of this step
	section
}

func (l *list[T]) of() *section  { return &l.section }
func (l *list[T]) bytes() []byte { return gpu.BytesOf(l.data) }
func (l *list[T]) entry() int64  { var x T; return int64(unsafe.Sizeof(x)) }

// address is where kernels read the list.
func (l *list[T]) address(m *memory) uint64 { return m.table.Address() + uint64(l.at) }

// entries are a list of any type.
type entries interface {
	of() *section
	bytes() []byte
	entry() int64 // bytes of one
}

// layOut places lists of so much room, one behind the other. It writes nothing.
func layOut(lists []entries) (placed []section, end int64) {
	const align = 64
	placed = make([]section, len(lists))
	for i, l := range lists {
		s := *l.of()
		s.room, s.at = growth(s.room, s.need, s.least), end
		end += (int64(s.room+s.extra)*l.entry() + align - 1) / align * align
		placed[i] = s
	}
	return placed, end
}

// growth is room for more than what is needed, so that it will do for a while.
func growth(have, need, least int) int {
	if need <= have && least <= have {
		return have
	}
	return max(least, 1<<bits.Len(uint(max(need, 64)-1)))
}

// workspace is the bytes of what thread blocks of the decode kernels hand each other parts of output
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
	tileRows, dim int   // of output tiles of the decode kernels
	scores        int64 // numbers
	parts, states int64 // bytes
}

// reserve takes memory for a step, and for the lists of a table. On error nothing has changed.
func (m *memory) reserve(e *Engine, lists []entries, r workspaceSize) (err error) {
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
	var placed []section
	if m.table == nil || slices.ContainsFunc(lists, func(l entries) bool { return !l.of().fits() }) {
		// Pinned memory goes only when copies of it are done.
		for i := range m.staging {
			if err = m.staging[i].wait(); err != nil {
				return err
			}
		}
		var end int64
		placed, end = layOut(lists)
		if next.table, err = e.dev.NewBuffer(end); err != nil {
			return err
		}
		fresh = append(fresh, next.table)
		for i := range next.staging {
			s := &next.staging[i]
			*s = staging{}
			if s.host, err = e.dev.NewHost(int(end)); err != nil {
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
	for i, s := range placed {
		*lists[i].of() = s
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

// upload copies a plan's parts, by way of pinned memory that no copy reads.
func (m *memory) upload(s *cuda.Stream, p *Plan) error {
	to := &m.staging[m.next]
	if err := to.wait(); err != nil {
		return err
	}
	begin, end := int64(-1), int64(0)
	for _, l := range p.lists() {
		data, at := l.bytes(), l.of().at
		if len(data) == 0 {
			continue
		}
		if err := to.host.Write(int(at), data); err != nil {
			return err
		}
		if begin < 0 {
			begin = at
		}
		end = at + int64(len(data))
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
