package layers

import (
	"fmt"
	"slices"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/weight"
)

// Skinny GEMMs: linear layers of the rows of a batch, up to 128, by clusters whose thread blocks share the columns of
// x.

// Constants of the kernels (kernels/gemm_skinny.cuh).
const (
	skinnyTile  = 64                   // rows of W
	skinnyBlock = 64                   // columns of a column block
	skinnyStage = 2 * skinnyTile * 128 // bytes of a stage of the ring: two column blocks of a tile
	skinnyX     = 128                  // bytes of a part of a column block of x, for a row
	skinnyFloat = 2 * 128              // bytes of the same as floats
	skinnyFixed = 1024                 // bytes before the ring: barriers, and some floats for each row
)

// groupCapability is the compute capability of kernels with products of warp groups: these, and those of
// persistent.go. Newer GPUs compute the same rows as a GEMM or GEMV.
const groupCapability = 90

// skinnyKinds are the kernels: the parts of x's elements, the rows of x of a block, how many column blocks of x its
// lanes keep in registers (not wide, and wide), and its epilogue warps. If ready, a launch makes operands of x first (kernels/gemm_ready.cuh).
var skinnyKinds = [...]struct {
	parts, rows, few, wide, epilogues int
	ready                             bool
}{
	{2, 8, 16, 32, 2, false}, {2, 16, 8, 16, 2, false}, {2, 32, 4, 8, 4, false}, {2, 64, 4, 1, 8, false},
	{1, 32, 4, 8, 4, false}, {1, 64, 0, 0, 8, true},
}

const (
	// leastSkinny is the least number of rows: for fewer rows a GEMV is faster.
	leastSkinny = 3
	mostSkinny  = 128
)

// fewOf returns how many column blocks of x a kernel that is not wide keeps in registers.
func (d *Engine) fewOf(kind int) int {
	k := &skinnyKinds[kind]
	if d.copied && k.few > k.wide {
		return k.wide
	}
	return k.few
}

// skinnyThreads returns the threads of a block: eight warps that multiply, one that copies, and the epilogue warps.
func skinnyThreads(kind int) int { return (9 + skinnyKinds[kind].epilogues) * 32 }

const (
	// The ring has as many stages as fit. A block beside another one has 6 at most.
	leastSkinnyStages, someSkinnyStages, mostSkinnyStages = 3, 6, 10

	mostSkinnySplit = 16 // most thread blocks of a cluster

	// Costs of a launch, in column blocks of W that one thread block could read: making operands of a column block of
	// eight rows of x; the least of a tile of each of the two warp groups, whose sums travel; and a cluster of more
	// than 8 blocks, for which so many multiprocessors have to be free. These numbers choose best for 60 layers of
	// OPT-125m to 6.7b in steps of 4, 8 and 16 rows.
	skinnyOperands = 2.2
	skinnyMore     = 0.4 // for each eight rows after the first 16
	skinnyMeeting  = 8
	skinnyLarge    = 26
	skinnyReady    = 20 // a launch that makes operands of x

	// With the rows in two neighbouring clusters each weight is read twice, the second time from the L2 cache: the
	// cost of that for each cluster.
	skinnyBeside = 0.6
	skinnyShort  = 1.3 // the same for a ring shorter than leastSkinnyStages
	mostBeside   = 2

	skinnyShorter = 2 // of a kind that is ready, shorter than someSkinnyStages

	// A block that reads at most skinnyLittle leaves space for a block of the next launch, if possible.
	skinnyLittle = 64 << 10
)

// skinnySplits are the possible numbers of thread blocks of a cluster. One block is no cluster, and may not send.
var skinnySplits = [...]int{2, 4, 8, mostSkinnySplit}

// skinnyKernels are the kernels for weights of a format, for one part or two: not wide, and wide.
type skinnyKernels [len(skinnyKinds)][2]*cuda.Function

// loadSkinny loads the kernels of a format and a number of parts from a module.
func (d *Engine) loadSkinny(m *cuda.Module, prefix string, of weight.Format, parts int) (*skinnyKernels, error) {
	k := new(skinnyKernels)
	for i := range skinnyKinds {
		if skinnyKinds[i].parts != parts {
			continue
		}
		for wide, suffix := range [...]string{"", "_wide"} {
			if parts == 1 {
				suffix += "_rounded"
			}
			f, err := gpu.WithShared(m, fmt.Sprintf("%sbatch_%s_%d%s", prefix, of.Kernels(), skinnyKinds[i].rows, suffix))
			if err != nil {
				return nil, err
			}
			if err := f.SetLargeClusters(); err != nil {
				return nil, err
			}
			k[i][wide] = f
			if skinnyKinds[i].ready { // no slice is in registers
				break
			}
		}
	}
	return k, nil
}

// skinnyLaunch is a launch of a skinny GEMM.
type skinnyLaunch struct {
	kind            int // index of skinnyKinds
	wide            int // 1: a block's slice of x is wide
	split, clusters int
	below           int // clusters that share the rows
	stages, shared  int
}

// configureSkinny chooses the launch of a Linear of a batch's rows; ok is false if there is none. The number of
// thread blocks of a cluster is chosen by the work of the busiest block.
func (d *Engine) configureSkinny(o *Linear) (best skinnyLaunch, ok bool, err error) {
	if of := o.format(); !hasKernels(of) || d.skinny[of] == nil || o.Rows < leastSkinny || o.Rows > mostSkinny {
		return best, false, nil
	}
	least := 0.0
	fewer := 0 // rows of the kernel tried before
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

// configureClusters is configureSkinny for clusters of split thread blocks, of which `below` share the rows. A result
// without clusters means too little shared memory.
func (d *Engine) configureClusters(o *Linear, kind, below, split int) (l skinnyLaunch, err error) {
	tiles, blocks := o.tilesOf(skinnyTile), attn.Ceil(attn.Ceil(o.In, skinnyBlock), split)
	l = skinnyLaunch{kind: kind, split: split, below: below}
	if blocks > d.fewOf(kind) && !skinnyKinds[kind].ready {
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
	n, err := d.clustersAtOnce(clusterKey{o.format(), -2 - 2*kind - l.wide, split, l.shared, o.gates()}, kernels[kind][l.wide], clusterGrid(1, split, skinnyThreads(kind), l.shared, true))
	l.clusters = min(n/below, tiles) * below
	return l, err
}

// cost returns the cost of a launch of tiles, of which each is one or, in a gated unit, two; a block has the given
// column blocks of each. The cost is the mean over all clusters, since a cluster that ends early makes space for the
// next launch.
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
	if skinnyKinds[l.kind].ready && l.stages < someSkinnyStages {
		cost *= skinnyShorter
	} else if l.stages < leastSkinnyStages {
		cost *= skinnyShort
	}
	if k := &skinnyKinds[l.kind]; k.ready {
		cost += skinnyReady
	} else {
		eights := float64(k.rows / 8)
		cost += float64(blocks) * (min(eights, 2)*skinnyOperands + max(eights-2, 0)*skinnyMore)
	}
	if l.split > mostSplit {
		cost += skinnyLarge
	}
	return cost
}

// micros returns the time of a launch on sms multiprocessors besides its tiles: weights come from memory once, and
// from the L2 cache once for each cluster with rows of x.
func (l *skinnyLaunch) micros(o *Linear, sms int) float64 {
	k, elements := &skinnyKinds[l.kind], 0.0
	for i := range o.Parts {
		elements += float64(o.In) * float64(o.Parts[i].Out)
	}
	weights := elements * float64(o.format().Bytes())
	t := max(weights/memoryRate, float64(l.below)*weights/cacheRate, elements*float64(l.below*k.rows*k.parts)/(skinnyRate*float64(sms)))
	if l.stages < leastSkinnyStages || k.ready && l.stages < someSkinnyStages {
		t *= skinnyShort
	}
	ends := skinnyEnds + skinnyColumn*(float64(o.In)+elements/float64(o.In))
	if 2*o.Rows > mostSkinny {
		ends += skinnyBelow
	}
	return t + ends
}

// skinnyLent returns how many stages of the ring x has at first: floats that are not in registers are larger than
// operands of one part.
func (d *Engine) skinnyLent(kind, blocks int) int {
	k := &skinnyKinds[kind]
	if k.ready || blocks <= max(d.fewOf(kind), k.wide) {
		return 0
	}
	return attn.Ceil(blocks*k.rows*(skinnyFloat-k.parts*skinnyX), skinnyStage)
}

// skinnyShared returns the shared memory of a launch whose blocks read the given bytes of weights, and the stages of
// its ring, 0 if it does not fit. The shared memory is more than half of a multiprocessor's: if two blocks fitted,
// the next launch's clusters would gather on the first free multiprocessors, two blocks on each, and the others would
// idle. A launch that reads little takes less, so that the next launch's blocks can begin.
func (d *Engine) skinnyShared(kind, blocks int, norm bool, reads int) (shared, stages int) {
	const partials = 2 * skinnyTile // floats a row of x, in two buffers
	k := &skinnyKinds[kind]
	rows := k.rows
	mine, least := partials*rows, leastSkinnyStages
	if rows > skinnyKinds[1].rows {
		least--
	}
	least = max(least, d.skinnyLent(kind, blocks))
	if norm && !k.ready { // before the partials: moments, gamma and beta
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

// operands returns the launch that makes operands of x for a launch of a kind that is ready.
func (l *skinnyLaunch) operands() *gemmLaunch {
	k := &skinnyKinds[l.kind]
	return &gemmLaunch{parts: k.parts, rows: k.rows, beside: 1, below: 1}
}

// scratch returns how many float32 the operands take.
func (l *skinnyLaunch) scratch(o *Linear) int {
	if !skinnyKinds[l.kind].ready {
		return 0
	}
	return l.operands().scratch(o)
}

// queueSkinny queues a checked Linear of a batch's rows, and stores its results in a cache if keep has one.
func (d *Engine) queueSkinny(s *cuda.Stream, o *Linear, l skinnyLaunch, keep fusedAppend, cache ...gpu.Memory) error {
	kernels, err := d.skinnyOf(o)
	if err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	p := skinnyParams{linearParams: linearParams{x: o.X.Address(), rows: int32(o.Rows), split: int32(l.split), stages: int32(l.stages)}, keep: keep}
	kind, norm := &skinnyKinds[l.kind], o.Norm
	if kind.ready {
		if err := o.Scratch.CheckFloats("linear", "the scratch", l.scratch(o)); err != nil {
			return err
		}
		if err := d.queueOperands(s, o, o.Parts[0].W.DType, l.operands()); err != nil {
			return err
		}
		norm = nil
		p.x, err = d.operandMap(o, l.operands())
	} else {
		p.x, err = d.tensorMap(&o.X, o.In, o.Rows, kind.rows)
	}
	if err != nil {
		return err
	}
	// A box of two neighbouring column blocks loads 5% faster than two boxes.
	pairs := o.In%(2*skinnyBlock*l.split) == 0
	if pairs {
		p.pairs = 1
	}
	if err := d.linearArgs(&p.linearParams, o, norm, 0, skinnyTile, pairs); err != nil {
		return err
	}
	if kind.ready {
		p.gamma = l.operands().factors(o)
		d.hold(o.Scratch)
	}
	cuda.Struct(&d.args, &p)
	d.hold(o.X)
	d.hold(cache...)
	return kernels[l.kind][l.wide].Launch(s, clusterGrid(l.clusters, l.split, skinnyThreads(l.kind), l.shared, true), &d.args)
}
