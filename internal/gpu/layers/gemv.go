package layers

import (
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/weight"
)

// GEMVs: linear layers of few rows. Thread blocks read the weights of a tile once, for all rows.

// Constants of the kernels (kernels/gemm_gemv.cuh).
const (
	gemvRows  = 16
	gemvWarps = 8
	gemvTile  = 32 // rows of W
	gemvPad   = 16 // floats between rows of x, and
	sumsPad   = 4  // between rows of a warp's sums, in shared memory
)

// gemvLaunch is a launch of a GEMV.
type gemvLaunch struct {
	rows          int // rows of the launch
	split, stages int
	clusters      int
	shared        int
}

// configureGEMV chooses the launch of a kernel for the next rows. norm: the kernel normalises x.
func (d *Engine) configureGEMV(kernel *cuda.Function, of weight.Format, rows, in, tiles int, norm bool) (best gemvLaunch, ok bool, err error) {
	all, least := attn.Ceil(in*of.Bytes(), 128), 0 // column blocks
	for rows = min(rows, gemvRows); rows > 0 && !ok; rows-- {
		for split := 1; split <= min(mostSplit, all) && (split == 1 || d.overlap()); split *= 2 {
			shared, stages := d.gemvShared(of, rows, attn.Ceil(all, split), norm)
			if stages == 0 {
				continue
			}
			clusters, err := d.gemvAtOnce(kernel, of, split, shared)
			if err != nil {
				return best, false, err
			}
			if clusters = min(clusters, tiles); clusters == 0 {
				continue
			}
			// The column blocks of one thread block. A meeting costs as much as reading some column blocks.
			cost := attn.Ceil(tiles, clusters) * attn.Ceil(all, split)
			if split > 1 {
				cost += attn.Ceil(tiles, clusters) * meeting
			}
			if !ok || cost < least {
				best, least, ok = gemvLaunch{rows: rows, split: split, stages: stages, clusters: clusters, shared: shared}, cost, true
			}
		}
	}
	return best, ok, nil
}

// gemvAtOnce returns how many clusters of a Linear may run at once.
func (d *Engine) gemvAtOnce(kernel *cuda.Function, of weight.Format, split, shared int) (int, error) {
	return d.clustersAtOnce(clusterKey{of, -1, split, shared, kernel != d.gemv[of]}, kernel, clusterGrid(1, split, gemvWarps*32, shared, true))
}

const (
	// The shared memory of a launch leaves space for the next launch's blocks on the multiprocessor. A launch whose
	// rings would be too short takes more.
	sharedBeside = 113 << 10
	sharedAlone  = 200 << 10

	mostStagesOf = 6  // stages of a warp's ring
	meeting      = 12 // cost of a meeting of a cluster's blocks, in column blocks
)

// gemvShared returns the shared memory of a launch and the stages of its rings, 0 if the launch does not fit.
func (d *Engine) gemvShared(of weight.Format, rows, blocks int, norm bool) (shared, stages int) {
	stride := blocks*128/of.Bytes() + gemvPad
	rest := rows*stride + gemvWarps*rows*(gemvTile+sumsPad) + 2*rows*gemvTile + (2*gemvWarps+1)*gemvRows
	if norm {
		rest += 2 * stride
	}
	rest *= 4
	const stage = gemvTile*128 + 8
	fit := func(most int) int { return (min(most, d.info.SharedPerBlockMost) - rest) / (gemvWarps * stage) }
	stages = fit(sharedBeside)
	for _, most := range [...]int{sharedAlone, d.info.SharedPerBlockMost} {
		if stages < 2 {
			stages = fit(most)
		}
	}
	stages = min(stages, mostStagesOf, max(2, attn.Ceil(blocks, gemvWarps)+1))
	if !d.overlap() { // the kernel is compiled for two numbers
		if stages >= 4 {
			stages = 4
		} else {
			stages = min(stages, 2)
		}
	}
	if stages < 2 {
		return 0, 0
	}
	return rest + stages*gemvWarps*stage, stages
}
