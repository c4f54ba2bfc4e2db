package layers

import (
	"math/bits"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/weight"
)

// Linear layers with weights of 8 and 4 bits, of up to fewColumns columns of operands: clusters whose thread blocks share the columns of W
// (kernels/gemm_narrow_few.cuh). Layers of up to fewColumns/fewDigits rows multiply integers if their weights are integers
// (kernels/gemm_narrow_integers.cuh).

// Constants of the kernels.
const (
	fewWarps   = 8 // that multiply
	fewThreads = (fewWarps + 4) * 32
	fewStage   = narrowWeights
	fewShare   = 64 // rows of W that clusters share out
	fewZeros   = 64

	fewDigits = 4         // operands of an element of x, of kernels that multiply integers
	fewExact  = 1<<17 - 1 // the most columns of W for which sums of products of bytes fit 32 bits

	fewColumns   = 16 // columns of operands
	narrowFewest = fewColumns + 1

	fewStages = 12 // most stages of a ring
	fewLeast  = 4  // fewest: there are four producers, each of which has every fourth stage

	// Costs, in stages of a launch's busiest block. Clusters that are chosen by these costs are within 2% of the best ones, in the mean of 8
	// layers of Llama-3-8B and OPT-6.7b with INT8 and INT4, of 1, 4 and 16 rows.
	fewEnd      = 6   // of the end of a tile
	fewOperands = 0.8 // of 1024 elements of x
)

// fewHigh are the rows of W of a job, and fewTeams the teams of warps that take stages in turn. A slot of the ring has stages of one team
// alone: a team that is a round ahead of another one would mistake the end of an older round for that of its own.
var (
	fewHigh  = [...]int{64, 32}
	fewTeams = [...]int{2, 1}
)

// configureFew chooses the launch by clusters for a part. ok reports whether there is one.
func (d *Engine) configureFew(l *narrowLaunch, k *narrowKernels, rows, parts int) (ok bool, err error) {
	if !d.narrowGroups() || rows*parts > fewColumns {
		return false, nil
	}
	w, of, cut := l.packed, l.of, parts
	if integers := k.integers[w.Kernels]; integers != nil && w.Kind != weight.PackedRuns && w.Columns <= fewExact && rows*fewDigits <= fewColumns && narrowColumns[d.narrowKindOf(w, rows*fewDigits)] <= fewColumns {
		of, cut = integers, fewDigits
	}
	columns := rows * cut
	kind := d.narrowKindOf(w, columns)
	if narrowColumns[kind] > fewColumns {
		return false, nil
	}
	units, pieces, best := attn.Ceil(w.Chunks, 2), attn.Ceil(w.Rows, fewShare), 0.0
	stage := fewStage
	if w.Kind == weight.PackedScales {
		stage += narrowFactors(w) * narrowTile * w.Factor
	} else {
		stage += 2 * narrowFactors(w) * narrowTile * w.Factor
	}
	for ranks := mostSplit; ranks > 0; ranks /= 2 {
		if ranks > units {
			continue
		}
		most := attn.Ceil(units, ranks)
		shared, stages := d.fewShared(w, kind, rows, cut, most, stage)
		if stages == 0 {
			continue
		}
		g := clusterGrid(1, ranks, fewThreads, shared, true)
		clusters, err := d.clustersAtOnce(clusterKey{w.Format, -100 - kind - cut*len(narrowColumns), ranks, shared, false}, of[kind], g)
		if err != nil {
			return false, err
		}
		if clusters = min(clusters, pieces); clusters == 0 {
			continue
		}
		reads, ends := fewWork(pieces, clusters, most, kind)
		elements := float64(most*narrowDeep(w)*32*rows) / 1024
		if cost := float64(reads) + fewEnd*float64(ends) + fewOperands*elements; !ok || cost < best {
			ok, best = true, cost
			l.kind, l.units, l.stages, l.stage, l.shared, l.ranks, l.blocks = kind, units, stages, stage, shared, ranks, ranks*clusters
			l.of, l.cut = of, cut
		}
	}
	return ok, nil
}

// fewWork returns the stages and the tiles of the busiest cluster, if thread blocks have up to `most` units of columns each. tileOf
// (kernels/gemm_narrow_few.cuh) cuts tiles in the same way.
func fewWork(pieces, clusters, most, kind int) (stages, tiles int) {
	jobs := narrowTile / fewHigh[kind]
	for c := range clusters {
		first, end := c*pieces/clusters*(fewShare/fewHigh[kind]), (c+1)*pieces/clusters*(fewShare/fewHigh[kind])
		s, t := 0, 0
		for ; first < end; t++ {
			of := 1 << (bits.Len(uint(min(end-first, jobs-first%jobs))) - 1)
			s += attn.Ceil(most*of, jobs)
			first += of
		}
		if s > stages || s == stages && t > tiles {
			stages, tiles = s, t
		}
	}
	return stages, tiles
}

// fewShared returns the shared memory of a block with some units, and the stages of its ring, 0 if it does not fit.
func (d *Engine) fewShared(w *weight.Packed, kind, rows, cut, units, stage int) (shared, stages int) {
	columns := rows * cut
	deep, blocks, bytes, pairs := units*narrowDeep(w), attn.Ceil(columns, 8), 64, attn.Ceil(columns, 2)
	if cut == fewDigits {
		bytes, pairs = 32, rows
	}
	rest := fewZeros + deep*columns*bytes + fewWarps*fewHigh[kind]*8*pairs + 2*32*blocks + 16
	if w.Kind == weight.PackedMinima || cut == fewDigits && w.Kernels == "int4" {
		rest += attn.Ceil(deep*columns*4, 16) * 16
	}
	stage += 16
	fit := func(most int) int {
		n := min((most-rest)/stage, fewStages)
		return n - n%fewTeams[kind]
	}
	stages = fit(min(sharedBeside, d.info.SharedPerBlockMost)) // leaves space for the next launch's blocks
	if stages < fewLeast {
		stages = fit(d.info.SharedPerBlockMost)
	}
	if stages < fewLeast {
		return 0, 0
	}
	return rest + stages*stage, stages
}

// queueFew queues a launch by clusters for the rows of x from number `row` on. d.mu is held.
func (d *Engine) queueFew(s *cuda.Stream, o *Linear, p *narrowPlan, l *narrowLaunch, x gpu.Memory, row int) error {
	rows := min(p.rows, o.Rows-row)
	a := l.arguments(o, p, row, rows)
	if !l.packed.Super {
		a.ahead = 0 // on an H200, a prefetch makes launches up to 10% longer
	}
	a.x, a.columns, a.parts, a.in, a.ranks = x.Address()+uint64(row)*uint64(o.In)*4, int32(rows*l.cut), int32(l.cut), int32(o.In), int32(l.ranks)
	part, last := &o.Parts[l.first], &o.Parts[l.first+l.parts-1]
	if l.packed.Order > 0 {
		a.order = part.W.Address() + uint64(l.packed.Order)
	}
	d.args.Reset()
	cuda.Struct(&d.args, &a)
	d.hold(x, part.W, part.B, part.Y, last.Y, o.Residual)
	g := clusterGrid(l.blocks/l.ranks, l.ranks, fewThreads, l.shared, true)
	g.Waits = !o.Early
	return l.of[l.kind].Launch(s, g, &d.args)
}
