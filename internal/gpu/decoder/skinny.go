package decoder

import (
	"fmt"
	"slices"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
)

// Skinny GEMMs: linear layers of the rows of a batch, up to 128, by clusters whose thread blocks
// share the columns of x.

// Constants of the kernels (kernels/gemm_skinny.cuh).
const (
	skinnyTile  = 64                   // rows of W
	skinnyBlock = 64                   // columns of a column block
	skinnyStage = 2 * skinnyTile * 128 // bytes of a stage of the ring: two column blocks of a tile
	skinnyX     = 2 * 128              // bytes of a column block of x, a row
	skinnyFixed = 1024                 // bytes of what lies before the ring: barriers, and some floats for each row
)

// groupCapability is what kernels are for that have products of warp groups: these, and
// those of persistent.go. Later GPUs have the same rows as a GEMM, or as few.
const groupCapability = 90

// skinnyRows are how many rows of x there are kernels for, how many column blocks of these a
// block's lanes keep in registers if it is not a wide one, and its epilogue warps.
var skinnyRows = [...]struct{ rows, few, epilogues int }{{8, 16, 2}, {16, 8, 2}, {32, 4, 4}, {64, 4, 8}}

// Of fewer rows than leastSkinny a GEMV is faster.
const (
	leastSkinny = 3
	mostSkinny  = 128
)

// skinnyThreads are those of a block: eight warps that multiply, one that copies, and those
// that finish.
func skinnyThreads(kind int) int { return (9 + skinnyRows[kind].epilogues) * 32 }

const (
	// Stages of the ring, as many as there is room for. A block beside another one's has 6 at most.
	leastSkinnyStages, someSkinnyStages, mostSkinnyStages = 3, 6, 10

	mostSkinnySplit = 16 // thread blocks of a cluster

	// What a launch takes, in column blocks of W that one thread block could read:
	// making operands of a column block of eight rows of x; a tile of each of the two warp
	// groups, which is as many at least, since its sums have a way to go; and a cluster of
	// more than 8, for which so many multiprocessors have to be free. The numbers are those
	// that choose best for 60 layers of OPT-125m to 6.7b in steps of 4, 8 and 16 rows.
	skinnyOperands = 2.2
	skinnyMore     = 0.4 // for each eight rows behind the first 16
	skinnyMeeting  = 8
	skinnyLarge    = 26

	// Of the rows of two clusters side by side each weight is read twice, the second time
	// from the L2 cache: how long that takes for each of them.
	skinnyBeside = 0.6
	skinnyShort  = 1.3 // the same of a ring that is short of leastSkinnyStages
	mostBeside   = 2

	// A block that reads no more than this leaves room for one of the next launch, where
	// it can.
	skinnyLittle = 64 << 10
)

// skinnySplits are the thread blocks that a cluster may have. One block is no cluster,
// and may not send.
var skinnySplits = [...]int{2, 4, 8, mostSkinnySplit}

// skinnyKernels are the kernels for weights of a type: not wide ones, and wide ones.
type skinnyKernels [len(skinnyRows)][2]*cuda.Function

// loadSkinny loads the kernels of a type from the module of GEMMs.
func (d *Engine) loadSkinny(m *cuda.Module, prefix string, element attn.DType) (*skinnyKernels, error) {
	k := new(skinnyKernels)
	for i := range skinnyRows {
		for wide, suffix := range [...]string{"", "_wide"} {
			f, err := gpu.WithShared(m, &d.info, fmt.Sprintf("%sbatch_%s_%d%s", prefix, gpu.Name(element), skinnyRows[i].rows, suffix))
			if err != nil {
				return nil, err
			}
			if err := f.SetLargeClusters(); err != nil {
				return nil, err
			}
			k[i][wide] = f
		}
	}
	return k, nil
}

// skinnyLaunch is how a launch looks.
type skinnyLaunch struct {
	kind            int // an index of skinnyRows
	wide            int // 1: a block's slice of x is
	split, clusters int
	below           int // clusters that share the rows out
	stages, shared  int
}

// configureSkinny says how a Linear of the rows of a batch is launched, if it is one:
// how many thread blocks a cluster has is chosen by what the busiest block does.
func (d *Engine) configureSkinny(o *Linear) (best skinnyLaunch, ok bool, err error) {
	element := o.Parts[0].W.DType
	if !gpu.Known(element) || d.skinny[element] == nil || o.Rows < leastSkinny || o.Rows > mostSkinny {
		return best, false, nil
	}
	least := 0.0
	for kind := range skinnyRows {
		below := attn.Ceil(o.Rows, skinnyRows[kind].rows)
		if below > 1 && skinnyRows[kind].epilogues == 2 || below > mostBeside || slices.Contains(d.leftOut, skinnyRows[kind].rows) {
			continue
		}
		if kind > 0 && o.Rows <= skinnyRows[kind-1].rows {
			break
		}
		for _, split := range d.splits {
			l, err := d.configureClusters(o, kind, below, split)
			if err != nil {
				return best, false, err
			}
			if l.clusters == 0 || l.below > 1 && 2*o.Rows > mostSkinny && l.stages < leastSkinnyStages {
				continue // tiles are faster than a short ring: 42 us and 49 (8192 x 2048), 117 and 154 (4096 x 16384)
			}
			if cost := l.cost(o.tilesOf(skinnyTile), o.together(), attn.Ceil(attn.Ceil(o.In, skinnyBlock), split)); !ok || cost < least {
				best, least, ok = l, cost, true
			}
		}
	}
	return best, ok, nil
}

// configureClusters is configureSkinny for clusters of so many thread blocks, of which so many
// share the rows out. Without clusters: there is too little shared memory.
func (d *Engine) configureClusters(o *Linear, kind, below, split int) (l skinnyLaunch, err error) {
	element, tiles, blocks := o.Parts[0].W.DType, o.tilesOf(skinnyTile), attn.Ceil(attn.Ceil(o.In, skinnyBlock), split)
	l = skinnyLaunch{kind: kind, split: split, below: below}
	if blocks > skinnyRows[kind].few {
		l.wide = 1
	}
	reads := attn.Ceil(below*tiles*o.together()*split, max(d.info.Multiprocessors, 1)) * blocks * skinnyStage / 2
	if l.shared, l.stages = d.skinnyShared(skinnyRows[kind].rows, blocks, o.Norm != nil, reads); l.stages == 0 {
		return l, nil
	}
	kernels, err := d.skinnyOf(o)
	if err != nil {
		return l, err
	}
	n, err := d.clustersAtOnce(clusterKey{element, -2 - 2*kind - l.wide, split, l.shared, o.gates()}, kernels[kind][l.wide], clusterGrid(1, split, skinnyThreads(kind), l.shared, true))
	l.clusters = min(n/below, tiles) * below
	return l, err
}

// cost is what a launch of so many tiles takes, each of which is one or, of a gated unit, two,
// whose blocks have so many column blocks of each: in the mean of all clusters, since one that is done early makes room for the next
// launch.
func (l *skinnyLaunch) cost(tiles, together, blocks int) float64 {
	clusters := l.clusters / l.below
	each, more := tiles/clusters, tiles%clusters
	of := func(tiles int) int {
		tiles *= together
		return tiles*blocks + attn.Ceil(tiles, 2)*max(skinnyMeeting-blocks, 0)
	}
	cost := float64(of(each)*(clusters-more)+of(each+1)*more) / float64(clusters)
	if l.below > 1 {
		cost *= skinnyBeside
	}
	if l.stages < leastSkinnyStages {
		cost *= skinnyShort
	}
	eights := float64(skinnyRows[l.kind].rows / 8)
	cost += float64(blocks) * (min(eights, 2)*skinnyOperands + max(eights-2, 0)*skinnyMore)
	if l.split > mostSplit {
		cost += skinnyLarge
	}
	return cost
}

// skinnyShared is the shared memory of a launch whose blocks read so many bytes of weights,
// and the stages of its ring, 0 where it does not fit. It is more than half of what there
// is: where two blocks fit on a multiprocessor, the next launch's clusters gather on the
// first ones that are free, two blocks on each, and the others have nothing to do. Not so
// where there is little to read: then what counts is that the next launch's blocks have
// begun.
func (d *Engine) skinnyShared(rows, blocks int, norm bool, reads int) (shared, stages int) {
	const partials = 2 * skinnyTile // floats a row of x, in two places
	mine, least := partials*rows, leastSkinnyStages
	if rows > skinnyRows[1].rows {
		least--
	}
	if norm { // before there are partials: its moments, and gamma and beta
		mine = max(mine, 2*mostSkinnySplit*rows+2*blocks*skinnyBlock)
	}
	rest := skinnyFixed + blocks*rows*skinnyX + 4*(partials*rows+mine)
	if n := (sharedBeside - rest) / skinnyStage; reads <= skinnyLittle && n >= leastSkinnyStages {
		stages = min(n, someSkinnyStages)
		return rest + stages*skinnyStage, stages
	}
	stages = min((d.info.SharedPerBlockMost-rest)/skinnyStage, mostSkinnyStages)
	if stages < least {
		return 0, 0
	}
	return max(rest+stages*skinnyStage, min(sharedBeside+1024, d.info.SharedPerBlockMost)), stages
}

// skinnyParams is struct SkinnyParams.
type skinnyParams struct {
	x cuda.TensorMap
	linearParams
	keep  skinnyAppend
	pairs int32
	_     [4]byte
}

// skinnyAppend is struct SkinnyAppend.
type skinnyAppend struct {
	cache         [mostParts]uint64
	slots, ahead  uint64
	headRows, dim int32
	pageBytes     int32
	_             [4]byte
}

// queueSkinny queues a Linear of the rows of a batch, which was checked: and has it keep what
// it makes in a cache.
func (d *Engine) queueSkinny(s *cuda.Stream, o *Linear, l skinnyLaunch, keep skinnyAppend, cache ...gpu.Memory) error {
	kernels, err := d.skinnyOf(o)
	if err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	p := skinnyParams{linearParams: linearParams{x: o.X.Address(), rows: int32(o.Rows), split: int32(l.split), stages: int32(l.stages)}, keep: keep}
	if p.x, err = d.tensorMap(&o.X, o.In, o.Rows, skinnyRows[l.kind].rows); err != nil {
		return err
	}
	// Two column blocks side by side in a box come 5% faster than by a box each.
	pairs := o.In%(2*skinnyBlock*l.split) == 0
	if pairs {
		p.pairs = 1
	}
	if err := d.linearArgs(&p.linearParams, o, o.Norm, 0, skinnyTile, pairs); err != nil {
		return err
	}
	cuda.Struct(&d.args, &p)
	d.hold(o.X)
	d.hold(cache...)
	return kernels[l.kind][l.wide].Launch(s, clusterGrid(l.clusters, l.split, skinnyThreads(l.kind), l.shared, true), &d.args)
}
