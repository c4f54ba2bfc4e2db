package attention

import (
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/vector"
)

// Kernels read keys and values of 8 bits in place if their scales are those of tokens: they multiply scores by the scales
// of keys, and weights by the scales of values. The elements of such rows are never NaN, unless the scale is.

// scaled has the scales of a tile's keys and values.
type scaled struct{ keyScales, valueScales rowScales }

// rowScales has the scales of a plane's rows, which lie in the order of the rows.
type rowScales struct {
	rows, scales unsafe.Pointer // the first row, and its scale; nil: there are no scales
	row          int            // bytes of a row
	factor       float32        // by which scales are larger than rows need
}

// readScaled reports whether kernels can read planes of keys and values with scales, for queries of float32.
func readScaled(g *attn.Problem) bool {
	f := &g.Pages
	for _, p := range [...]*attn.Plane{f.Key(), f.ValuePlane()} {
		packed := attn.PageStrides{Page: attn.Product(g.KVHeads, g.PageTokens, p.Dim), Head: attn.Product(g.PageTokens, p.Dim), Row: p.Dim}
		if p.Scales != attn.ScalesByToken || p.DType.Size() != 1 || p.At != packed {
			return false
		}
	}
	return !f.InKeys()
}

// int8Queries is the factor of queries for keys of Int8, so that sums of products stay as finite as scores.
const int8Queries = 0x1p-6

// scaledRows returns the scales of a layer whose pages kernels read in place.
func (ws *workspace[F]) scaledRows() (s scaled) {
	f := &ws.plan.g.Pages
	if f.Key().Scales == attn.NoScales {
		return s
	}
	of := func(plane int) rowScales {
		m := &ws.ops.Pages[plane]
		return rowScales{rows: m.Data.Ptr, scales: m.Scales.Ptr, row: f.Planes[plane].Dim, factor: 1}
	}
	s = scaled{of(0), of(f.Value.Plane)}
	if f.Key().DType == attn.Int8 {
		s.keyScales.factor = 1 / int8Queries
	}
	return s
}

// apply multiplies column c of the tile's scores, or weights, by the scale of row c of some streams, and by a factor. A row
// of x has stride elements.
func (s *rowScales) apply(t *tile, x []float32, stride int, streams []Streams, step int, factor float32) {
	if s.scales == nil {
		return
	}
	var by [256]float32
	factor *= s.factor
	step /= s.row
	for first := 0; first < t.Count; first += len(by) {
		n := min(len(by), t.Count-first)
		for c := first; c < first+n; {
			run, at := &streams[c/t.Run], c%t.Run
			end := min(first+n, c+t.Run-at) // of the run, or of by
			var rows [4]int
			for i := range min(4, end-c) {
				rows[i] = int(uintptr(run[i])-uintptr(s.rows))/s.row + at/4*step
			}
			s.gather(by[c-first:end-first], rows, step, factor)
			c = end
		}
		for r := range t.Rows {
			vector.Times(x[r*stride+first:][:n], by[:n])
		}
	}
}

// gather writes the scales of rows, times a factor, to by: those of rows[c%4] + c/4*step.
func (s *rowScales) gather(by []float32, rows [4]int, step int, factor float32) {
	quads := len(by) / 4
	if step == 1 && quads > 0 { // four streams of neighbours: most keys
		stream := func(i int) []float32 { return unsafe.Slice(at32(s.scales, rows[i]), quads) }
		x, y, z, w := stream(0), stream(1), stream(2), stream(3)
		y, z, w = y[:len(x)], z[:len(x)], w[:len(x)]
		for j, a := range x {
			four := (*[4]float32)(by[4*j:])
			four[0], four[1], four[2], four[3] = a*factor, y[j]*factor, z[j]*factor, w[j]*factor
		}
	} else {
		quads = 0
	}
	for c := 4 * quads; c < len(by); c++ {
		by[c] = *at32(s.scales, rows[c%4]+c/4*step) * factor
	}
}

// scaleScores multiplies scores by the scales of the tile's keys. factor is what the kernel's elements lack.
func scaleScores[F cpu.Real](t *tile, scores []F, stride int, factor float32) {
	if x, ok := any(scores).([]float32); ok {
		t.keyScales.apply(t, x, stride, t.K, t.KStep, factor)
	}
}

// scaleWeights multiplies weights by the scales of the tile's values, as scaleScores.
func scaleWeights[F cpu.Real](t *tile, weights []F, stride int, factor float32) {
	if x, ok := any(weights).([]float32); ok {
		t.valueScales.apply(t, x, stride, t.V, t.VStep, factor)
	}
}
