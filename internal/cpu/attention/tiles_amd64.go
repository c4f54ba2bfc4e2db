//go:build amd64 && gc && !noasm

package attention

// tiles has the steps of the attention kernel in tile registers (AMX). The functions are documented at their generated
// declarations.
type tiles struct {
	queries func(tiles, q *float32, rows, dim int)

	score, weighted func(so, qp *float32, kv **byte, at, rows, count, dim, stride, step int,
		ahead **byte, aheadAt, aheadStep int, wide *float32) (odd int)
}

const (
	tileRows  = 16   // at most
	tileKeys  = 64   // divisor of a call's keys
	tileDims  = 32   // divisor of dims
	tileStage = 1024 // elements of scratch before the queries

	// Sums of tilePanel columns pass over all keys in the order of memory. More columns pass over tilePanelKeys keys at
	// a time, so that prefetched rows are still in cache when they are used. That pays only with tileManyRows rows or
	// more.
	tilePanel     = 64
	tilePanelKeys = 128
	tileManyRows  = 9

	// From tileFewRows rows on tiles are faster than rows in registers, for keys and values of up to tilePanel
	// elements.
	tileFewRows = 3
)

// tiled returns the number of t's keys, or values, of dim elements for tile registers: those that fill whole tiles, or
// 0 if tiles are slower for t's rows.
func (a *assembly[F]) tiled(t *tile, dim int) int {
	few := a.few + 1
	if dim <= tilePanel {
		few = tileFewRows
	}
	if t.Alone || a.tiles == nil || dim%tileDims != 0 || len(t.K) > 1 && t.Run%tileKeys != 0 || t.Rows < few || t.Rows > tileRows {
		return 0
	}
	return t.Count / tileKeys * tileKeys
}

// tiledValues is tiled for the values.
func (a *assembly[F]) tiledValues(t *tile) int {
	if t.Rows < tileManyRows && t.ValueDim > tilePanel {
		return 0
	}
	return a.tiled(t, t.ValueDim)
}

// scoresInTiles computes the scores of all rows with the first keys and returns the number of these keys. It returns 0
// if there is an infinity, which only the other kernels preserve.
func (a *assembly[F]) scoresInTiles(t *tile, stride int) int {
	keys := a.tiled(t, t.Dim)
	if keys == 0 {
		return 0
	}
	queries := at32(t.Wide, tileStage)
	a.tiles.queries(queries, at32(t.Q, 0), t.Rows, t.Dim)
	run, last := t.Run/4, keys/4 // in quads
	const lead = tileKeys / 4
	for x := 0; x < last; {
		n := min(run-x%run, last-x)
		// After the last keys prefetch the presumed keys of the next call. weigh prefetches the values.
		ahead, aheadAt := &t.K[x/run], (x%run+lead)*t.KStep
		if y := x + lead; len(t.K) > 1 && y < last {
			n = min(n, run-y%run)
			ahead, aheadAt = &t.K[y/run], y%run*t.KStep
		}
		if a.tiles.score(at32(t.Scores, 4*x), queries, array(&t.K[x/run]), x%run*t.KStep,
			t.Rows, 4*n, t.Dim, stride, t.KStep, array(ahead), aheadAt, t.KStep, at32(t.Wide, 0)) != 0 {
			return 0
		}
		x += n
	}
	return keys
}

// valuesInTiles adds the weighted values of the first `keys` keys to all rows. It returns the number of keys that it
// has added, since it stops at an infinity.
func (a *assembly[F]) valuesInTiles(t *tile, stride, keys int) int {
	most, lead := keys/4, tileKeys/4 // in quads
	if t.ValueDim > tilePanel {
		most, lead = tilePanelKeys/4, tilePanelKeys/4
	}
	run, last := t.Run/4, keys/4
	for x := 0; x < last; {
		n := min(run-x%run, last-x, most)
		ahead, aheadAt := &t.V[x/run], (x%run+lead)*t.VStep
		if y := x + lead; len(t.V) > 1 && y < last {
			n = min(n, run-y%run)
			ahead, aheadAt = &t.V[y/run], y%run*t.VStep
		}
		if a.tiles.weighted(at32(t.O, 0), at32(t.Scores, 4*x), array(&t.V[x/run]), x%run*t.VStep,
			t.Rows, 4*n, t.ValueDim, stride, t.VStep, array(ahead), aheadAt, t.VStep, at32(t.Wide, 0)) != 0 {
			return 4 * x
		}
		x += n
	}
	return keys
}
