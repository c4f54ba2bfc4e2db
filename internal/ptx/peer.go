package ptx

// Memory of another GPU. A store arrives at any time after it is issued. Stores to different addresses arrive
// in any order, until the block executes one of:
//
//   - fence.sc.sys, fence.acq_rel.sys or membar.sys
//   - a store or an atomic with release semantics in the system scope
//
// The end of the launch also completes all stores. (A release by one thread completes all stores of the
// block. Threads of a block order their stores by barriers, which other checks cover.) The GPU that issued a
// store sees it as soon as one of the GPU's threads loads from the address. An atomic happens at once. Only a
// fence orders it after earlier stores.
//
// An access with an order (relaxed, acquire, release) must have the system scope.

// flight is an element on its way to another GPU.
type flight struct {
	block   *block
	address uint64
	n       int
	value   uint64
}

// strength is the memory ordering of an instruction.
type strength struct{ strong, sys, releases bool }

func (s *statement) strength() strength {
	volatile := s.has("volatile")
	return strength{
		strong:   volatile || s.has("relaxed") || s.has("acquire") || s.has("release") || s.has("acq_rel"),
		sys:      volatile || s.has("sys"),
		releases: s.has("release") || s.has("acq_rel"),
	}
}

// peer reports whether an address belongs to another GPU. It must follow find of the same address.
func (m *machine) peer(where space, address uint64) bool {
	return m.peers && (where == globalSpace || where == genericSpace && address>>56 == 0) && m.last[0].Peer
}

// ordered checks an access to another GPU's memory.
func (w *warp) ordered(s strength) {
	if s.strong && !s.sys {
		w.fail("memory of another GPU, and no .sys")
	}
}

// publish completes the block's stores if the instruction releases them in the system scope.
func (w *warp) publish(s strength) {
	if s.releases && s.sys {
		w.m.arriveAll(w.block)
	}
}

// send stores an element at any time from now on.
func (w *warp) send(address uint64, n int, value uint64) {
	w.m.arriveAt(address, n) // stores to the same address stay in order
	w.m.flights = append(w.m.flights, flight{w.block, address, n, value})
	w.m.count(address, n, 1)
}

// count changes the number of flights to an address by more.
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

// awaits reports whether a flight to an address may be pending.
func (m *machine) awaits(address uint64, n int) bool {
	for at := address / 4; at <= (address+uint64(n)-1)/4; at++ {
		if m.flying[at] > 0 {
			return true
		}
	}
	return false
}

// arrive completes flight i.
func (m *machine) arrive(i int) {
	f := &m.flights[i]
	store(m.find(f.address, f.n), f.n, f.value)
	m.count(f.address, f.n, -1)
	m.events++
	last := len(m.flights) - 1
	m.flights[i] = m.flights[last]
	m.flights = m.flights[:last]
}

// arriveAt completes the flights to an address.
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

// arriveAll completes the flights of a block, or all flights if of is nil.
func (m *machine) arriveAll(of *block) {
	for i := len(m.flights) - 1; i >= 0; i-- {
		if of == nil || m.flights[i].block == of {
			m.arrive(i)
		}
	}
}

// arriveSome sometimes completes a few flights.
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

// fence compiles fence and membar. Within a GPU they do nothing, because every write is visible at once.
func (c *compiler) fence(s *statement) func(w *warp, m uint32) {
	if !s.has("sys") {
		return func(*warp, uint32) {}
	}
	return func(w *warp, _ uint32) { w.m.arriveAll(w.block) }
}
