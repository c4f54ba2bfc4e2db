//go:build amd64 && gc && !noasm

package attention

import (
	"unsafe"

	"gorgonia.org/leanattention/internal/cpu"
)

// widening is how tiles of many rows read keys and values whose elements are much work to decode: they are decoded once for all rows,
// some keys at a time, and then the steps for float32 compute.
type widening struct {
	rows  func(dst *float32, x **byte, at, count, dim, step int)
	steps *assembly[float32]
	few   int // rows up to which decoding for each block of rows is faster
}

// widens reports whether `rows` rows of a tile use the steps for float32.
func (a *assembly[F]) widens(t *tile, rows int) bool {
	return a.widening != nil && !t.Alone && rows > a.widening.few
}

// widened is a walk over keys, or values, of a tile that are decoded to its scratch.
type widened[F cpu.Real] struct {
	a         *assembly[F]
	some      tile // the decoded rows, and their scores
	runs      []Streams
	step, dim int
	next, end int // keys
}

// widened begins a walk over keys, or values, [from, to) of t's streams. from is a multiple of 4.
func (a *assembly[F]) widened(t *tile, runs []Streams, step, dim, from, to int) widened[F] {
	w := widened[F]{a: a, some: *t, runs: runs, step: step, dim: dim, next: from, end: to}
	memory := unsafe.Add(t.Wide, 4*narrowWide(t.Dim, t.ValueDim))
	streams := unsafe.Slice((*Streams)(unsafe.Add(memory, 4*widenedKeys*max(t.Dim, t.ValueDim))), 1)
	for i := range streams[0] {
		streams[0][i] = unsafe.Add(memory, 4*i*dim)
	}
	w.some.Next, w.some.scaled = nil, scaled{}
	w.some.K, w.some.V, w.some.KStep, w.some.VStep = streams, streams, 16*dim, 16*dim
	return w
}

// more decodes the next rows of t. It returns false at the end.
func (w *widened[F]) more(t *tile) bool {
	if w.next >= w.end {
		return false
	}
	n := min(widenedKeys, w.end-w.next)
	w.some.Count, w.some.Run, w.some.Scores = n, widenedKeys, unsafe.Pointer(at32(t.Scores, w.next))
	for end, to := w.next+n, w.some.K[0][0]; w.next < end; {
		run, key := &w.runs[w.next/t.Run], w.next%t.Run
		n := min(end-w.next, t.Run-key)
		w.a.widening.rows((*float32)(to), array(run), key/4*w.step, n, w.dim, w.step)
		to, w.next = unsafe.Add(to, 4*n*w.dim), w.next+n
	}
	return true
}

// scoresWidened computes the scores of all rows with all keys.
func (a *assembly[F]) scoresWidened(t *tile, stride int) {
	for w := a.widened(t, t.K, t.KStep, t.Dim, 0, t.Count); w.more(t); {
		a.widening.steps.scoresStored(&w.some, stride)
	}
}

// valuesWidened adds the weighted values of keys [from, to) to rows [row, row+rows).
func (a *assembly[F]) valuesWidened(t *tile, stride, row, rows, from, to int) {
	for w := a.widened(t, t.V, t.VStep, t.ValueDim, from, to); w.more(t); {
		a.widening.steps.valuesStored(&w.some, stride, row, rows, 0, w.some.Count)
	}
}

// fourBits completes the steps for keys and values of 4 bits, by those for float32.
func fourBits(a, wide *assembly[float32], w widening) *assembly[float32] {
	a.dims, a.size, a.keys, a.weigh = 1, 1, wide.keys, wide.weigh
	w.steps, a.widening = wide, &w
	return a
}
