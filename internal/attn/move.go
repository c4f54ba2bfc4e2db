package attn

// Move is elements of four axes that are taken from one place to another. Those of the last axis, N, lie
// together in both.
type Move struct {
	Dims     [3]int
	N        int
	From, To Lattice
}

// Lattice is where elements lie: the first one, and how far apart they are along each axis but the last.
type Lattice struct {
	At    int
	Steps [3]int
}

// Count is how many elements move.
func (m *Move) Count() int { return m.Dims[0] * m.Dims[1] * m.Dims[2] * m.N }

// Extent is how many elements a place has at least.
func (m *Move) Extent(l *Lattice) int {
	last := l.At + m.N
	for i, d := range m.Dims {
		last += (d - 1) * l.Steps[i]
	}
	return last
}

// Back is the same the other way.
func (m Move) Back() Move {
	m.From, m.To = m.To, m.From
	return m
}

// MoveElements moves elements in host memory.
func MoveElements[F any](m *Move, to, from []F) {
	for a := range m.Dims[0] {
		for b := range m.Dims[1] {
			for c := range m.Dims[2] {
				at := func(l *Lattice) int { return l.At + a*l.Steps[0] + b*l.Steps[1] + c*l.Steps[2] }
				copy(to[at(&m.To):][:m.N], from[at(&m.From):][:m.N])
			}
		}
	}
}
