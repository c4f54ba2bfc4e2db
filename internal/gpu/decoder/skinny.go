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
	skinnyX     = 128                  // bytes of a part of a column block of x, a row
	skinnyFloat = 2 * 128              // bytes of one as floats
	skinnyFixed = 1024                 // bytes of what lies before the ring: barriers, and some floats for each row
)

// groupCapability is what kernels are for that have products of warp groups: these, and
// those of persistent.go. Later GPUs have the same rows as a GEMM, or as few.
const groupCapability = 90

// skinnyKinds are the kernels: the parts of x's elements, how many rows of x a block has, how many
// column blocks of these its lanes keep in registers, if it is not a wide one and if it is, and its
// epilogue warps.
var skinnyKinds = [...]struct{ parts, rows, few, wide, epilogues int }{
	{2, 8, 16, 32, 2}, {2, 16, 8, 16, 2}, {2, 32, 4, 8, 4}, {2, 64, 4, 1, 8},
	{1, 32, 4, 8, 4}, {1, 64, 4, 1, 8},
}

const (
	// Of fewer rows a GEMV is faster.
	leastSkinny = 3
	mostSkinny  = 128
)

// fewOf is how many column blocks of x a kernel that is not a wide one keeps in registers.
func (d *Engine) fewOf(kind int) int {
	k := &skinnyKinds[kind]
	if d.copied && k.few > k.wide {
		return k.wide
	}
	return k.few
}

// skinnyThreads are those of a block: eight warps that multiply, one that copies, and those
// that finish.
func skinnyThreads(kind int) int { return (9 + skinnyKinds[kind].epilogues) * 32 }

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

// skinnyKernels are the kernels for weights of a type, of one part or of two: not wide ones, and
// wide ones.
type skinnyKernels [len(skinnyKinds)][2]*cuda.Function

// loadSkinny loads the kernels of a type, and of so many parts, from a module.
func (d *Engine) loadSkinny(m *cuda.Module, prefix string, element attn.DType, parts int) (*skinnyKernels, error) {
	k := new(skinnyKernels)
	for i := range skinnyKinds {
		if skinnyKinds[i].parts != parts {
			continue
		}
		for wide, suffix := range [...]string{"", "_wide"} {
			if parts == 1 {
				suffix += "_rounded"
			}
			f, err := gpu.WithShared(m, &d.info, fmt.Sprintf("%sbatch_%s_%d%s", prefix, gpu.Name(element), skinnyKinds[i].rows, suffix))
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
	kind            int // an index of skinnyKinds
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
	fewer := 0 // rows that a kernel has which was looked at
	for kind, k := range skinnyKinds {
		below := attn.Ceil(o.Rows, k.rows)
		if k.parts != o.operandParts() || o.Rows <= fewer {
			continue
		}
		fewer = k.rows
		if below > 1 && k.epilogues == 2 || below > mostBeside || slices.Contains(d.leftOut, k.rows) {
			continue
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
	if blocks > d.fewOf(kind) {
		l.wide = 1
	}
	reads := attn.Ceil(below*tiles*o.together()*split, max(d.info.Multiprocessors, 1)) * blocks * skinnyStage / 2
	if l.shared, l.stages = d.skinnyShared(kind, blocks, o.Norm != nil, reads); l.stages == 0 {
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
	eights := float64(skinnyKinds[l.kind].rows / 8)
	cost += float64(blocks) * (min(eights, 2)*skinnyOperands + max(eights-2, 0)*skinnyMore)
	if l.split > mostSplit {
		cost += skinnyLarge
	}
	return cost
}

// micros is what a launch takes on so many multiprocessors, beside what tiles take: weights come from memory once, and
// from the L2 cache once for each cluster that has rows of x.
func (l *skinnyLaunch) micros(o *Linear, sms int) float64 {
	k, elements := &skinnyKinds[l.kind], 0.0
	for i := range o.Parts {
		elements += float64(o.In) * float64(o.Parts[i].Out)
	}
	weights := elements * float64(o.Parts[0].W.DType.Size())
	t := max(weights/memoryRate, float64(l.below)*weights/cacheRate, elements*float64(l.below*k.rows*k.parts)/(skinnyRate*float64(sms)))
	if l.stages < leastSkinnyStages {
		t *= skinnyShort
	}
	ends := skinnyEnds + skinnyColumn*(float64(o.In)+elements/float64(o.In))
	if 2*o.Rows > mostSkinny {
		ends += skinnyBelow
	}
	return t + ends
}

// skinnyLent is how many stages of the ring x has at first: floats that are not in registers take
// more room than operands of one part.
func (d *Engine) skinnyLent(kind, blocks int) int {
	k := &skinnyKinds[kind]
	if blocks <= max(d.fewOf(kind), k.wide) {
		return 0
	}
	return attn.Ceil(blocks*k.rows*(skinnyFloat-k.parts*skinnyX), skinnyStage)
}

// skinnyShared is the shared memory of a launch whose blocks read so many bytes of weights,
// and the stages of its ring, 0 where it does not fit. It is more than half of what there
// is: where two blocks fit on a multiprocessor, the next launch's clusters gather on the
// first ones that are free, two blocks on each, and the others have nothing to do. Not so
// where there is little to read: then what counts is that the next launch's blocks have
// begun.
func (d *Engine) skinnyShared(kind, blocks int, norm bool, reads int) (shared, stages int) {
	const partials = 2 * skinnyTile // floats a row of x, in two places
	k := &skinnyKinds[kind]
	rows := k.rows
	mine, least := partials*rows, leastSkinnyStages
	if rows > skinnyKinds[1].rows {
		least--
	}
	least = max(least, d.skinnyLent(kind, blocks))
	if norm { // before there are partials: its moments, and gamma and beta
		mine = max(mine, 2*mostSkinnySplit*rows+2*blocks*skinnyBlock)
	}
	rest := skinnyFixed + blocks*rows*k.parts*skinnyX + 4*(partials*rows+mine)
	if n := (sharedBeside - rest) / skinnyStage; reads <= skinnyLittle && n >= max(leastSkinnyStages, least) {
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
	keep  fusedAppend
	pairs int32
	_     [4]byte
}

// fusedAppend is struct FusedAppend.
type fusedAppend struct {
	cache         [mostParts]uint64
	slots, ahead  uint64
	headRows, dim int32
	pageBytes     int32
	_             [4]byte
}

// queueSkinny queues a Linear of the rows of a batch, which was checked: and has it keep what
// it makes in a cache.
func (d *Engine) queueSkinny(s *cuda.Stream, o *Linear, l skinnyLaunch, keep fusedAppend, cache ...gpu.Memory) error {
	kernels, err := d.skinnyOf(o)
	if err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	p := skinnyParams{linearParams: linearParams{x: o.X.Address(), rows: int32(o.Rows), split: int32(l.split), stages: int32(l.stages)}, keep: keep}
	if p.x, err = d.tensorMap(&o.X, o.In, o.Rows, skinnyKinds[l.kind].rows); err != nil {
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
