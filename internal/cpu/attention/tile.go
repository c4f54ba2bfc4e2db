package attention

import (
	"unsafe"

	"gorgonia.org/leanattention/internal/cpu"
)

// tile holds the arguments of one call of a kernel: some rows of queries against some keys, all of one
// KV head. F is the type of the queries.
type tile struct {
	Rows  int // rows of queries, at least 1
	Count int // keys, at least 1

	// Alone: the bits of a row are those that it would have as the only one of its tile, with the keys that it sees.
	Alone bool

	Dim, ValueDim int

	Q    unsafe.Pointer // *F, Rows x Dim, Scale*log4(e) folded in
	O    unsafe.Pointer // *F, Rows x ValueDim: the attention states of the rows, not normalised,
	M, L unsafe.Pointer // *F, Rows: their maxima and their sums

	// Keys come in runs of Run keys, the last of which may be shorter; Run is a multiple of 4 if there is
	// more than one. A run is four streams of rows: with c counted from its first key, key c of run i
	// lies at K[i][c%4] + c/4*KStep, its value at V[i][c%4] + c/4*VStep. So four neighbouring keys come
	// from four streams: quarters of a longer range, or pages (memory delivers several streams faster
	// than one), or simply the next four rows. Pointers that a run leaves without a key are not used.
	K, V         []Streams
	Run          int
	KStep, VStep int // bytes

	// Next is where the streams of the next call's keys begin, or nil. It is a hint: nothing is read.
	Next *Streams

	// Visible is nil when every row sees all keys. Otherwise row r sees keys c < Visible[r] only,
	// 0 <= Visible[r] <= Count; with it, there is one run, of the next four rows, so that c counts
	// up in the sequence's order.
	Visible unsafe.Pointer // *int32, Rows

	// What modifies the scores, and which of the sequence's keys the tile's are.
	scoreMod
	order order

	// What drops weights. With it, there is one run, of the next four rows.
	drop

	Scores unsafe.Pointer // *F, scratch of Rows x Count rounded up to a multiple of 16
	// *F, scratch of max(32 x Dim rounded up to a multiple of 16 + 1024, 16 x ValueDim + 3584)
	Wide unsafe.Pointer
}

// Streams are pointers to four rows of keys or values.
type Streams [4]unsafe.Pointer

// order says which keys of a sequence those of a tile are, by their numbers from the first one on. The zero order is
// that of the sequence: key c is number c.
type order struct {
	streams bool   // otherwise key c of run i is number first[c%4] + c/4 + i*skip
	first   [4]int // of each stream
	skip    int
}

// array is s as assembly takes it.
func array(s *Streams) **byte { return (**byte)(unsafe.Pointer(s)) }

// kernel merges the keys of a tile into the attention states of its rows. For each row r:
//
//	s_c = q_r . k_c              (c < Count, or < Visible[r])
//	s_c = Cap tanh(s_c/Cap)      (with a Cap)
//	s_c = s_c + Slopes[r] (Distances[r]+j)   (with Slopes, j being c's number by order)
//	s_c = s_c + BiasScale Bias[r][j]         (with a Bias)
//	m   = max(M_r, max_c s_c)
//	p_c = 4^(s_c-m)
//	O_r = 4^(M_r-m) O_r + sum_c p_c v_c      (with a drop, of those that it keeps)
//	L_r = 4^(M_r-m) L_r + sum_c p_c
//	M_r = m
//
// A row that sees no key, or whose m is -Inf, is left as it is: the empty state has M = -Inf, L = 0,
// O = 0. NaN in q_r, or in a key or value that r sees, reaches the row's state; what r does not see
// never does. Sums are in F, in an order that depends on nothing but the sizes in t. Nothing is
// written but O, M, L and scratch, and nothing read but what the fields name.
type kernel func(t *tile)

// at returns a pointer to F i of those at p.
func at[F cpu.Real](p unsafe.Pointer, i int) *F {
	return (*F)(unsafe.Add(p, uintptr(i)*unsafe.Sizeof(F(0))))
}

// at32 is at for float32.
func at32(p unsafe.Pointer, i int) *float32 { return at[float32](p, i) }
