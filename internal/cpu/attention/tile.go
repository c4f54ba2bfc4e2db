package attention

import (
	"unsafe"

	"gorgonia.org/leanattention/internal/cpu"
)

// tile has the arguments of one kernel call: rows of queries and keys of one KV head. F is the type of the queries.
type tile struct {
	Rows  int // rows of queries, at least 1
	Count int // keys, at least 1

	// Alone: a row has the bits that it would have as the only row of its tile, with its visible keys only.
	Alone bool

	Dim, ValueDim int

	Q    unsafe.Pointer // *F, Rows x Dim, Scale*log4(e) folded in
	O    unsafe.Pointer // *F, Rows x ValueDim: the rows' states, not normalised
	M, L unsafe.Pointer // *F, Rows: the states' maxima and sums

	// Keys come in runs of Run keys. The last run may be shorter. Run is a multiple of 4 if there is more than one run.
	// A run is four streams of rows: key c of run i, counted from the run's first key, is at K[i][c%4] + c/4*KStep, and
	// its value at V[i][c%4] + c/4*VStep. So four consecutive keys come from four streams: quarters of a longer range,
	// or pages (memory serves several streams faster than one), or the next four rows. Pointers of a run without a key
	// are not used.
	K, V         []Streams
	Run          int
	KStep, VStep int // bytes

	// Next has the addresses of the next call's streams of keys, or is nil. It is a prefetch hint.
	Next *Streams

	// Visible is nil if all keys are visible to every row. Otherwise keys c < Visible[r] are visible to row r, with 0
	// <= Visible[r] <= Count. There is one run then, of consecutive rows, so that c follows the sequence's order.
	Visible unsafe.Pointer // *int32, Rows

	// The modification of scores, and the positions of the tile's keys in the sequence.
	scoreMod
	order order

	// Dropout. With it there is one run, of consecutive rows.
	drop

	scaled // scales of keys and values

	Scores unsafe.Pointer // *F, scratch of Rows x Count rounded up to a multiple of 16
	// *F, scratch of wideOf(Dim, ValueDim)
	Wide unsafe.Pointer
}

// Streams are pointers to four rows of keys or values.
type Streams [4]unsafe.Pointer

// order has the positions of a tile's keys in the sequence, from the first key on. In the zero order key c has number
// c.
type order struct {
	streams bool   // if true, key c of run i has number first[c%4] + c/4 + i*skip
	first   [4]int // of each stream
	skip    int
}

// array returns s in the form that assembly takes.
func array(s *Streams) **byte { return (**byte)(unsafe.Pointer(s)) }

// kernel merges the keys of a tile into the attention states of its rows. For each row r:
//
//	s_c = q_r . k_c              (c < Count, or < Visible[r]), times the scale of k_c
//	s_c = Cap tanh(s_c/Cap)      (with a Cap)
//	s_c = s_c + Slopes[r] (Distances[r]+j)   (with Slopes, j being c's number by order)
//	s_c = s_c + BiasScale Bias[r][j]         (with a Bias)
//	m   = max(M_r, max_c s_c)
//	p_c = 4^(s_c-m)
//	O_r = 4^(M_r-m) O_r + sum_c p_c v_c      (with a drop, over the kept keys; v_c times its scale)
//	L_r = 4^(M_r-m) L_r + sum_c p_c
//	M_r = m
//
// A row without visible keys, or whose m is -Inf, is left unchanged: the empty state has M = -Inf, L = 0, O = 0. NaN in
// q_r, or in a visible key or value, reaches the row's state. Invisible keys and values never do. Sums are in F, in an
// order that depends only on the sizes in t. A kernel writes only O, M, L and scratch, and reads only the memory that
// the fields name.
type kernel func(t *tile)

// at returns a pointer to element i of the F at p.
func at[F cpu.Real](p unsafe.Pointer, i int) *F {
	return (*F)(unsafe.Add(p, uintptr(i)*unsafe.Sizeof(F(0))))
}

// at32 is at for float32.
func at32(p unsafe.Pointer, i int) *float32 { return at[float32](p, i) }
