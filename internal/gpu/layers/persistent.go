package layers

import (
	"fmt"
	"slices"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/weight"
)

// Persistent GEMMs: linear layers of hundreds of rows. One thread block on each multiprocessor walks tiles; or
// clusters of two blocks walk pairs of tiles with the same rows of W.

// Constants of the kernels (kernels/gemm_persistent.cuh).
const (
	persistentThreads = 12 * 32
	persistentRows    = 128       // rows of x in a tile
	persistentRing    = 192 << 10 // bytes
	persistentStaging = 8 * 16 * 64 * 4
)

const (
	// leastPersistent is the least number of rows: more than a single tile has.
	leastPersistent = persistentRows + 1

	// Costs, in steps of 128 rows of x in two parts by 128 of W: the end of a tile, for each 128 of its columns; the
	// factor of steps of tiles of 128 columns over 256, since they load more operands for each product; and of pairs
	// whose blocks each load all weights.
	persistentEnds   = 2.5
	persistentNarrow = 1.1
	persistentAlone  = 1.05
	persistentStep   = 0.8 // microseconds of such a step
)

// persistentTile is the number of rows of W of a tile, and the number of blocks that share them.
type persistentTile struct{ columns, split int }

var (
	persistentColumns = [...]int{256, 128}
	persistentTiles   = [...]persistentTile{{256, 2}, {256, 1}, {128, 2}, {128, 1}}
)

// persistentKernels are the kernels for weights of a format, by the parts of x less 1.
type persistentKernels [len(persistentColumns)][2]*cuda.Function

// persistentOf returns the kernels of a format. Their module is loaded when a layer first has so many rows, which is
// rare before a program's first prompt, and may be within a capture.
func (d *Engine) persistentOf(of weight.Format, gates bool) (*persistentKernels, error) {
	d.loading.Lock()
	defer d.loading.Unlock()
	unit, prefix, to := gemmUnit, "", &d.gemm[of].persistent[0]
	if gates {
		unit, prefix, to = gatedGEMMUnit, gatedPrefix, &d.gemm[of].persistent[1]
	}
	if *to != nil {
		return *to, nil
	}
	k := new(persistentKernels)
	err := d.dev.Relaxed(func() error {
		m, err := gpu.Module(d.dev, unit)
		if err != nil {
			return err
		}
		for i, columns := range persistentColumns {
			for parts, suffix := range [...]string{"_rounded", ""} {
				if k[i][parts], err = gpu.WithShared(m, fmt.Sprintf("%sgemm_%s_%d%s", prefix, of.Kernels(), columns, suffix)); err != nil {
					return err
				}
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	*to = k
	return k, nil
}

// persistentStages returns the stages of the ring, whose length is the same for all tiles.
func persistentStages(parts, columns int) int {
	return persistentRing / (128 * (parts*persistentRows + columns))
}

// configurePersistent is configureGEMM for these kernels. A result without a kernel means that they don't take the
// Linear.
func (d *Engine) configurePersistent(o *Linear) (best gemmLaunch, err error) {
	of, parts := o.format(), o.operandParts()
	if o.Rows < leastPersistent || d.info.Capability != groupCapability {
		return best, nil
	}
	kernels, err := d.persistentOf(of, o.gates())
	if err != nil {
		return best, err
	}
	steps := attn.Ceil(o.In, gemmStep)
	for _, tile := range d.persistent {
		kind := slices.Index(persistentColumns[:], tile.columns)
		columns, box := tile.columns, tile.columns/tile.split
		if o.Gate { // a tile has as many rows of both parts, and a box is of one part
			columns, box = columns/2, columns/2
		}
		l := gemmLaunch{
			kernel: kernels[kind][parts-1], rows: persistentRows, below: persistentRows * tile.split, columns: columns, box: box, parts: parts,
			split: tile.split, beside: 1, threads: persistentThreads, stages: persistentStages(parts, tile.columns),
		}
		l.shared = persistentRing + persistentStaging + 16*l.stages
		if l.shared > d.info.SharedPerBlockMost {
			continue
		}
		key := clusterKey{of, 2*len(gemmRows) + 2*kind + parts, l.split, l.shared, o.gates()}
		clusters, err := d.clustersAtOnce(key, l.kernel, clusterGrid(1, l.split, l.threads, l.shared, true))
		if err != nil {
			return best, err
		}
		tiles := o.tilesOf(columns) * attn.Ceil(o.Rows, persistentRows*l.split) // a block or a cluster has one at a time
		if l.blocks = min(tiles, clusters); l.blocks < 1 {
			continue
		}
		each := float64(steps*parts*tile.columns)/256 + persistentEnds*float64(tile.columns)/128
		if tile.columns == 128 {
			each *= persistentNarrow
		}
		if tile.split == 1 {
			each *= persistentAlone
		}
		if l.cost = float64(attn.Ceil(tiles, l.blocks)) * each * persistentStep; best.kernel == nil || l.cost < best.cost {
			best = l
		}
	}
	return best, nil
}
