package attention

import (
	"math"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/vector"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/lean"
)

// The Go kernels have one algorithm. Rows of keys and values of another type are widened to F.

func attendF32F32(t *tile)  { attend[float32](t, nil) }
func attendF32F64(t *tile)  { attend(t, widenF32F64) }
func attendF32F16(t *tile)  { attend(t, widenF32F16) }
func attendF32BF16(t *tile) { attend(t, widenF32BF16) }
func attendF32E4M3(t *tile) { attend(t, widenF32E4M3) }
func attendF32Int8(t *tile) { attend(t, widenF32Int8) }
func attendF32Q4(t *tile)   { attend(t, widenQ4[float32]) }
func attendF64F32(t *tile)  { attend(t, widenF64F32) }
func attendF64F64(t *tile)  { attend[float64](t, nil) }
func attendF64F16(t *tile)  { attend(t, widenF64F16) }
func attendF64BF16(t *tile) { attend(t, widenF64BF16) }

// widen widens the len(dst) elements at src into dst.
type widen[F cpu.Real] func(dst []F, src unsafe.Pointer)

// Widenings by the stored type.
var (
	widen32 = [attn.DTypes]widen[float32]{attn.Float32: widenF32F32, attn.Float64: widenF32F64, attn.Float16: widenF32F16, attn.BFloat16: widenF32BF16, attn.E4M3: widenF32E4M3, attn.Int8: widenF32Int8, attn.Q4: widenQ4[float32]}
	widen64 = [attn.DTypes]widen[float64]{attn.Float32: widenF64F32, attn.Float64: widenF64F64, attn.Float16: widenF64F16, attn.BFloat16: widenF64BF16, attn.E4M3: widenF64E4M3, attn.Int8: widenF64Int8, attn.Q4: widenQ4[float64]}
)

// widenTo returns the widening of a type to F.
func widenTo[F cpu.Real](from attn.DType) widen[F] {
	if w, ok := any(widen32[from]).(widen[F]); ok {
		return w
	}
	return any(widen64[from]).(widen[F])
}

func widenF32F32(dst []float32, src unsafe.Pointer) {
	copy(dst, unsafe.Slice((*float32)(src), len(dst)))
}

func widenF64F64(dst []float64, src unsafe.Pointer) {
	copy(dst, unsafe.Slice((*float64)(src), len(dst)))
}

func widenF32F64(dst []float32, src unsafe.Pointer) {
	for i, x := range unsafe.Slice((*float64)(src), len(dst)) {
		dst[i] = float32(x)
	}
}

func widenF32F16(dst []float32, src unsafe.Pointer) {
	half.DecodeFloat16(dst, unsafe.Slice((*uint16)(src), len(dst)))
}

func widenF32BF16(dst []float32, src unsafe.Pointer) {
	half.DecodeBFloat16(dst, unsafe.Slice((*uint16)(src), len(dst)))
}

func widenF32E4M3(dst []float32, src unsafe.Pointer) {
	half.DecodeE4M3(dst, unsafe.Slice((*uint8)(src), len(dst)))
}

func widenF32Int8(dst []float32, src unsafe.Pointer) {
	half.DecodeInt8(dst, unsafe.Slice((*uint8)(src), len(dst)))
}

func widenF64F32(dst []float64, src unsafe.Pointer) {
	for i, x := range unsafe.Slice((*float32)(src), len(dst)) {
		dst[i] = float64(x)
	}
}

func widenF64F16(dst []float64, src unsafe.Pointer) {
	for i, x := range unsafe.Slice((*half.Float16)(src), len(dst)) {
		dst[i] = float64(x.Float32())
	}
}

func widenF64BF16(dst []float64, src unsafe.Pointer) {
	for i, x := range unsafe.Slice((*half.BFloat16)(src), len(dst)) {
		dst[i] = float64(x.Float32())
	}
}

func widenF64E4M3(dst []float64, src unsafe.Pointer) {
	for i, x := range unsafe.Slice((*half.E4M3)(src), len(dst)) {
		dst[i] = float64(x.Float32())
	}
}

func widenF64Int8(dst []float64, src unsafe.Pointer) {
	for i, x := range unsafe.Slice((*half.Int8)(src), len(dst)) {
		dst[i] = float64(x.Float32())
	}
}

func widenQ4[F float32 | float64](dst []F, src unsafe.Pointer) {
	half.DecodeQ4(dst, unsafe.Slice((*half.Q4)(src), len(dst)/half.Q4Columns))
}

// attend implements kernel. It computes the scores of all rows, four keys at a time; then the weights, row by row; then
// the weighted sums of values, four keys at a time. So every key and value is loaded, and widened, once. If w is nil,
// keys and values have type F.
func attend[F cpu.Real](t *tile, w widen[F]) {
	stride := (t.Count + 3) / 4 * 4 // less than the scratch allows, so that rows stay close in memory
	a := attention[F]{
		tile: t, widen: w,
		q:      unsafe.Slice((*F)(t.Q), t.Rows*t.Dim),
		o:      unsafe.Slice((*F)(t.O), t.Rows*t.ValueDim),
		m:      unsafe.Slice((*F)(t.M), t.Rows),
		l:      unsafe.Slice((*F)(t.L), t.Rows),
		scores: unsafe.Slice((*F)(t.Scores), t.Rows*stride),
		stride: stride,
	}
	if t.Visible != nil {
		a.visible = unsafe.Slice((*int32)(t.Visible), t.Rows)
	}
	if w != nil {
		a.wide = unsafe.Slice((*F)(t.Wide), 4*max(t.Dim, t.ValueDim))
	}
	a.score()
	scaleScores(t, a.scores, stride, 1)
	modifyScores(t, a.scores, stride)
	keepScores(t, a.scores, stride)
	a.weigh()
	watchWeights(t, a.scores, t.M, stride)
	dropWeights(t, a.scores, stride)
	scaleWeights(t, a.scores, stride, 1)
	a.sum()
}

// attention has the memory of a tile as slices.
type attention[F cpu.Real] struct {
	*tile
	widen      widen[F]
	q, o, m, l []F
	scores     []F // stride a row; weights replace scores
	stride     int
	visible    []int32
	wide       []F
}

// load returns rows of dim elements: those of keys c, c+1, c+2 and c+3. If there are fewer keys, the first row fills
// the rest.
func (a *attention[F]) load(runs []Streams, c, step, dim int) (x [4][]F) {
	n := a.Count - c
	streams, offset := &runs[c/a.Run], c%a.Run/4*step
	for i := range x {
		switch {
		case i >= n:
			x[i] = x[0]
		case a.widen == nil:
			x[i] = unsafe.Slice((*F)(unsafe.Add(streams[i], offset)), dim)
		default:
			x[i] = a.wide[i*dim : (i+1)*dim]
			a.widen(x[i], unsafe.Add(streams[i], offset))
		}
	}
	return x
}

// score computes the scores of all rows with all keys, visible or not.
func (a *attention[F]) score() {
	d := a.Dim
	for c := 0; c < a.Count; c += 4 {
		k := a.load(a.K, c, a.KStep, d)
		for r := range a.Rows {
			vector.Dot4((*[4]F)(a.scores[r*a.stride+c:]), a.q[r*d:(r+1)*d], k[0], k[1], k[2], k[3])
		}
	}
}

// sees returns the number of keys visible to row r.
func (a *attention[F]) sees(r int) int {
	if a.visible == nil {
		return a.Count
	}
	return int(a.visible[r])
}

// weigh replaces the scores of each row by weights, and rescales the row's state to the new maximum.
func (a *attention[F]) weigh() {
	empty := F(math.Inf(-1))
	for r, old := range a.m {
		s := a.scores[r*a.stride : r*a.stride+a.sees(r)]
		m := max(old, vector.Maximum(s))
		if m == empty {
			continue
		}
		l := a.l[r]
		if m != old && old != empty {
			f := lean.Exp4(old - m)
			l *= f
			o := a.o[r*a.ValueDim : (r+1)*a.ValueDim]
			for i := range o {
				o[i] *= f
			}
		}
		a.m[r], a.l[r] = m, l+vector.Exponentials(s, m)
	}
}

// sum adds the weighted values to the states.
func (a *attention[F]) sum() {
	d := a.ValueDim
	for c := 0; c < a.Count; c += 4 {
		v := a.load(a.V, c, a.VStep, d)
		for r := range a.Rows {
			if a.m[r] == F(math.Inf(-1)) {
				continue // the row is still empty: it has no weights
			}
			o, p := a.o[r*d:(r+1)*d], a.scores[r*a.stride+c:]
			if n := a.sees(r) - c; n >= 4 {
				vector.Add4(o, (*[4]F)(p), v[0], v[1], v[2], v[3])
			} else {
				for i := range n {
					vector.Add1(o, p[i], v[i])
				}
			}
		}
	}
}
