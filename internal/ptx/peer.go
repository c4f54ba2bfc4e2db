package ptx

// Memory of another GPU. A store there arrives at any time from when it is made, and
// stores to different addresses in any order, until
//
//	fence.sc.sys, fence.acq_rel.sys or membar.sys of a thread of the block, or a store or an
//	atomic of it that releases in the system scope
//
// or the launch's end. (That holds all that the block has stored: what other threads of it
// have, they have handed over by a barrier, which is checked elsewhere.) Its own GPU sees a
// store as soon as one of its threads loads from the address. An atomic is done at once:
// nothing orders it behind stores before it but a fence.
//
// What has an order (relaxed, acquire, release) has to have the system scope there.

// flight is an element on its way to another GPU.
type flight struct {
	block   *block
	address uint64
	n       int
	value   uint64
}

// strength is what an instruction says of its order.
type strength struct{ strong, sys, releases bool }

func (s *statement) strength() strength {
	volatile := s.has("volatile")
	return strength{
		strong:   volatile || s.has("relaxed") || s.has("acquire") || s.has("release") || s.has("acq_rel"),
		sys:      volatile || s.has("sys"),
		releases: s.has("release") || s.has("acq_rel"),
	}
}

// peer says whether an address that was found just now is of another GPU.
func (m *machine) peer(where space, address uint64) bool {
	return m.peers && (where == globalSpace || where == genericSpace && address>>56 == 0) && m.last[0].Peer
}

// ordered checks an access to another GPU's memory.
func (w *warp) ordered(s strength) {
	if s.strong && !s.sys {
		w.fail("memory of another GPU, and no .sys")
	}
}

// publish has what the block has stored arrive, where an instruction releases it.
func (w *warp) publish(s strength) {
	if s.releases && s.sys {
		w.m.arriveAll(w.block)
	}
}

// send has an element arrive at any time.
func (w *warp) send(address uint64, n int, value uint64) {
	w.m.arriveAt(address, n) // stores to one address stay in order
	w.m.flights = append(w.m.flights, flight{w.block, address, n, value})
	w.m.count(address, n, 1)
}

// count is more or fewer flights to an address.
func (m *machine) count(address uint64, n, more int) {
	if m.flying == nil {
		m.flying = make(map[uint64]int)
	}
	for at := address / 4; at <= (address+uint64(n)-1)/4; at++ {
		if m.flying[at] += more; m.flying[at] == 0 {
			delete(m.flying, at)
		}
	}
}

// awaits says whether some may be on their way to an address.
func (m *machine) awaits(address uint64, n int) bool {
	for at := address / 4; at <= (address+uint64(n)-1)/4; at++ {
		if m.flying[at] > 0 {
			return true
		}
	}
	return false
}

// arrive has one arrive.
func (m *machine) arrive(i int) {
	f := &m.flights[i]
	store(m.find(f.address, f.n), f.n, f.value)
	m.count(f.address, f.n, -1)
	m.events++
	last := len(m.flights) - 1
	m.flights[i] = m.flights[last]
	m.flights = m.flights[:last]
}

// arriveAt has those to an address arrive.
func (m *machine) arriveAt(address uint64, n int) {
	if !m.awaits(address, n) {
		return
	}
	for i := len(m.flights) - 1; i >= 0; i-- {
		if f := &m.flights[i]; f.address < address+uint64(n) && address < f.address+uint64(f.n) {
			m.arrive(i)
		}
	}
}

// arriveAll has those of a block arrive, or all.
func (m *machine) arriveAll(of *block) {
	for i := len(m.flights) - 1; i >= 0; i-- {
		if of == nil || m.flights[i].block == of {
			m.arrive(i)
		}
	}
}

// arriveSome has a few arrive, now and then.
func (m *machine) arriveSome() {
	if len(m.flights) == 0 || m.rng.IntN(3) > 0 {
		return
	}
	for range 1 + m.rng.IntN(16) {
		if n := len(m.flights); n > 0 {
			m.arrive(m.rng.IntN(n))
		}
	}
}

// fence compiles fence and membar: of memory here every write is seen at once.
func (c *compiler) fence(s *statement) func(w *warp, m uint32) {
	if !s.has("sys") {
		return func(*warp, uint32) {}
	}
	return func(w *warp, _ uint32) { w.m.arriveAll(w.block) }
}
