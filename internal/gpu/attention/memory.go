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

// memory is a plan's memory on the GPU, and the pinned memory of its uploads. It grows and never shrinks.
type memory struct {
	generation uint64            // of the buffers
	table      *cuda.Buffer      // the sections in order
	staging    [stagings]staging // each holds one table: the plan writes one while others are copied
	next       int               // index of the staging to write next

	partials *cuda.Buffer // two for each thread block
	counters *cuda.Buffer // one for each thread block; zero between launches
	tagged   *cuda.Buffer // partials of LL protocol words, where blocks merge together; nil on GPUs without such kernels
	runs     *cuda.Buffer // three numbers for each thread block: see Reduce::begin; nil as tagged
	scores   *cuda.Buffer // of unfused attention; nil before first use
	parts    *cuda.Buffer // partials of output tiles of the prefill kernels, after their counters, which are zero between launches; nil before first use
	spread   *cuda.Buffer // queries and outputs, see attend; nil before first use
	sums     *cuda.Buffer // of weights, see measured; zero between launches; nil before first use
	states   *cuda.Buffer // of shared prefixes, see sharing.states; or of LeanTiles, with batch invariance; nil before first use
}

// buffers returns all buffers in a fixed order.
func (m *memory) buffers() [10]**cuda.Buffer {
	return [...]**cuda.Buffer{&m.table, &m.partials, &m.counters, &m.tagged, &m.runs, &m.scores, &m.parts, &m.states, &m.spread, &m.sums}
}

// stagings is 3, since a recording's copies count as made when its replay has ended: one staging for the running
// replay, one for the next replay, and one to write.
const stagings = 3

// staging is the pinned memory of one copy.
type staging struct {
	host *cuda.Host
	done *cuda.Event // recorded after the copy
	busy bool        // a copy may be in progress
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

// A section is one list's range in the plan's table. A part of the plan declares a list, fills it, and sets its
// lengths.
type section struct {
	need, least int   // entries of this step, and of the largest reserved step
	extra       int   // further entries at the end
	room        int   // capacity in entries, without extra
	at          int64 // offset in the table, in bytes
}

// want sets the number of entries: of this step, of the largest reserved step, and extra entries after either.
func (s *section) want(need, least, extra int) { s.need, s.least, s.extra = need, least, extra }

// fits reports whether the section has the capacity already.
func (s *section) fits() bool { return max(s.need, s.least) <= s.room }

// A list is a section's entries.
type list[T any] struct {
	data []T // of this step
	section
}

func (l *list[T]) of() *section  { return &l.section }
func (l *list[T]) bytes() []byte { return gpu.BytesOf(l.data) }
func (l *list[T]) entry() int64  { var x T; return int64(unsafe.Sizeof(x)) }

// address returns the list's address on the GPU.
func (l *list[T]) address(m *memory) uint64 { return m.table.Address() + uint64(l.at) }

// entries is a list of any type.
type entries interface {
	of() *section
	bytes() []byte
	entry() int64 // bytes of an entry
}

// layOut returns the sections of lists, one after the other, with the capacity that they want. It writes nothing.
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

// growth returns a capacity of at least need and least. A larger capacity is a power of two, so that it rarely grows.
func growth(have, need, least int) int {
	if need <= have && least <= have {
		return have
	}
	return max(least, 1<<bits.Len(uint(max(need, 64)-1)))
}

// workspace has the sizes, in bytes, of the buffers through which thread blocks of the decode kernels merge output
// tiles.
type workspace struct{ partials, counters, tagged, runs int64 }

// workspaceOf returns the workspace for output tiles of at most tileRows rows.
func (e *Engine) workspaceOf(tileRows, dim int) (w workspace) {
	w.partials = 2 * int64(e.blocks) * int64(tileRows) * int64(dim+2) * 4
	w.counters = int64(e.blocks) * 4
	if e.hasEpilogue() {
		w.tagged, w.runs = 2*w.partials, 3*int64(e.blocks)*4
	}
	return w
}

// mostStates bounds the bytes of states that are reserved in advance. A step with more states takes new memory.
const mostStates = 64 << 20

// statesBytes returns the size of the workspace with batch invariance, for `tiles` LeanTiles, of which an output tile
// has at most `longest`. The workspace holds the states of output tiles that several blocks share, and each block's
// running state. The size is a power of two: contexts grow, and most steps should not need new memory.
func (e *Engine) statesBytes(g *attn.Problem, tiles, longest int64, tileRows int) int64 {
	shared := min(tiles, int64(e.blocks-1)*longest)
	return 1 << bits.Len64(uint64(int64(tileRows)*4*(int64(e.blocks)*int64(2*g.Dim)+shared*int64(g.Dim+4))-1))
}

// reserveStates returns statesBytes of a step of capacity c, at most mostStates.
func (e *Engine) reserveStates(g *attn.Problem, c *Capacity, tileRows int) int64 {
	blocks := attn.Ceil(attn.Product(c.queries(), g.Group()), BlockRows)
	longest := attn.Ceil(attn.Product(c.Pages, g.PageTokens), tileTokens(g)) + 1
	tiles := attn.Product(g.KVHeads, blocks, longest+c.Sequences)
	return min(e.statesBytes(g, int64(tiles), int64(longest), tileRows), mostStates)
}

// workspaceSize is a step's need of memory besides the table.
type workspaceSize struct {
	tileRows, dim int   // of the decode kernels' output tiles
	scores        int64 // numbers
	parts, states int64 // bytes
	spread, sums  int64 // bytes
}

// reserve takes memory for a step and for the lists of a table. On error nothing has changed.
func (m *memory) reserve(e *Engine, lists []entries, r workspaceSize) (err error) {
	var fresh []interface{ Close() error } // made by this call, to be closed if a later allocation fails
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
		next.scores = nil // scores may be large
	case m.scores == nil || m.scores.Len() < r.scores*4:
		if next.scores, err = e.dev.NewBuffer(r.scores * 4); err != nil {
			return err
		}
		fresh = append(fresh, next.scores)
	}
	zeros := func(b **cuda.Buffer, bytes int64) error { // never shrinks
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
	if r.sums > 0 {
		if err = zeros(&next.sums, r.sums); err != nil {
			return err
		}
	}
	for _, of := range [...]struct {
		buffer **cuda.Buffer
		bytes  int64
	}{{&next.states, r.states}, {&next.spread, r.spread}} {
		if of.bytes == 0 || *of.buffer != nil && (*of.buffer).Len() >= of.bytes {
			continue
		}
		if *of.buffer, err = e.dev.NewBuffer(of.bytes); err != nil {
			return err
		}
		fresh = append(fresh, *of.buffer)
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
		// Pinned memory is closed after its copies.
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
	// The driver waits for queued work before it frees memory. If closing reports a failure of earlier work, the next
	// call reports it, too.
	_ = old.close()
	return nil
}

// upload queues the copy of a plan's lists, through a staging that no copy reads.
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
		// Without the event the end of the copy is unknown.
		if s.Synchronize() == nil {
			to.busy = false
		}
		return err
	}
	return nil
}

// close frees all memory. Memory that was freed with the device is no error.
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

// moved notes that p is unchanged, but in other memory.
func (p *Plan) moved() {
	if p.form.memory == p.memory.generation {
		return
	}
	p.form.memory, p.generation, p.state = p.memory.generation, p.generation+1, min(p.state, built)
}
