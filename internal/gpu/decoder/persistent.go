package decoder

import (
	"fmt"
	"slices"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gpu"
)

// Persistent GEMMs: linear layers of hundreds of rows, by one thread block a multiprocessor,
// which walks tiles.

// Constants of the kernels (kernels/gemm_persistent.cuh).
const (
	persistentThreads = 12 * 32
	persistentRows    = 128       // of x, of a tile
	persistentRing    = 192 << 10 // bytes
	persistentStaging = 8 * 16 * 64 * 4
)

const (
	// More rows than a single tile has are worth it.
	leastPersistent = persistentRows + 1

	// What the end of a tile takes, for each 128 of its columns, in steps of 128 rows of x in
	// two parts by 128 of W; and how much longer the steps of tiles of 128 columns take than
	// those of 256 by their products: they bring more operands for each.
	persistentEnds   = 2.5
	persistentNarrow = 1.1
)

// persistentColumns are how many rows of W a tile may have.
var persistentColumns = [...]int{256, 128}

// loadPersistent loads the kernels of a type.
func (d *Engine) loadPersistent(element attn.DType) error {
	m, err := gpu.Module(d.dev, gemmUnit)
	if err != nil {
		return err
	}
	for i, columns := range persistentColumns {
		for parts, suffix := range [...]string{"_rounded", ""} {
			f, err := gpu.WithShared(m, &d.info, fmt.Sprintf("gemm_%s_%d%s", gpu.Name(element), columns, suffix))
			if err != nil {
				return err
			}
			d.gemm[element].persistent[i][parts] = f
		}
	}
	return nil
}

// persistentStages are those of the ring: it is as long for all tiles.
func persistentStages(parts, columns int) int {
	return persistentRing / (128 * (parts*persistentRows + columns))
}

// configurePersistent is configureGEMM of these kernels, if they take a Linear.
func (d *Engine) configurePersistent(o *Linear) (best gemmLaunch, ok bool) {
	kernels := &d.gemm[o.Parts[0].W.DType].persistent
	if o.Rows < leastPersistent {
		return best, false
	}
	l := gemmLaunch{rows: persistentRows, parts: 2, split: 1, threads: persistentThreads}
	if o.RoundX {
		l.parts = 1
	}
	steps := attn.Ceil(o.In, gemmStep)
	for i, columns := range persistentColumns {
		if l.kernel = kernels[i][l.parts-1]; l.kernel == nil || !slices.Contains(d.persistent, columns) {
			continue
		}
		l.columns, l.stages = columns, persistentStages(l.parts, columns)
		l.shared = persistentRing + persistentStaging + 16*l.stages
		if l.shared > d.info.SharedPerBlockMost {
			continue
		}
		l.tiles = o.tilesOf(columns) * attn.Ceil(o.Rows, persistentRows)
		l.blocks = max(min(l.tiles, d.info.Multiprocessors), 1)
		each := float64(steps*l.parts*columns)/256 + persistentEnds*float64(columns)/128
		if columns == 128 {
			each *= persistentNarrow
		}
		if l.cost = float64(attn.Ceil(l.tiles, l.blocks)) * each; !ok || l.cost < best.cost {
			best, ok = l, true
		}
	}
	return best, ok
}
