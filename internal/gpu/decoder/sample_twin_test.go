//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package decoder

import (
	"math"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gpu/testgpu"
)

// What follows does what kernels/sample_tokens.cuh does, part by part: the same cuts by
// the same bisection, the same sums in fixed point.

// sampleTeams is one launch.
type sampleTeams struct {
	*sampleParams
	warps int // of a row
}

// sampleRow is one row of it.
type sampleRow struct {
	logits []float32
	parts  [][2]int // of each warp: its first logit, and the one behind its last
	top    float64
	perT   float64
	board  [3][]uint64 // what each warp told last
}

const (
	noKey       = 0x007fffff // of -Inf
	infiniteKey = 0xff800000
	oneWeight   = 1 << 44
)

func keyOf(x float32) uint32 {
	b := math.Float32bits(x)
	switch {
	case x != x:
		return math.MaxUint32
	case x == 0:
		return 1 << 31
	case b>>31 == 1:
		return ^b
	}
	return b | 1<<31
}

func logitOf(key uint32) float32 {
	if key>>31 == 1 {
		return math.Float32frombits(key &^ (1 << 31))
	}
	return math.Float32frombits(^key)
}

func (k *sampleTwin) sample(l *testgpu.Launch) {
	p := (*sampleParams)(unsafe.Pointer(&l.Arg[0]))
	greedy := l.Kernel == "sample_greedy"
	team := max(l.Cluster, 1)
	s := sampleTeams{sampleParams: p, warps: team * l.Threads / 32}
	switch {
	case team > 8 || l.Blocks%team != 0 || l.Shared != 0, l.Cluster > 0 && k.capability < 90:
		k.t.Errorf("%d blocks in clusters of %d", l.Blocks, l.Cluster)
	case l.Threads%32 != 0 || l.Threads > 1024 || s.warps > 128:
		k.t.Errorf("%d threads, %d warps of a row", l.Threads, s.warps)
	case greedy != (p.settings == 0) || p.vocab < 1 || p.vocab > MostVocab:
		k.t.Errorf("%s: %+v", l.Kernel, *p)
	}
	for _, i := range k.rng.Perm(l.Blocks / team) {
		set, u := Setting{}, 0.0
		if !greedy {
			set, u = *testgpu.At[Setting](p.settings, i), *testgpu.At[float64](p.random, i)
		}
		*testgpu.At[int32](p.ids, i) = s.choose(i, set, u)
	}
}

func (s *sampleTeams) choose(row int, set Setting, u float64) int32 {
	if !(set.Temperature >= 0) {
		return -1
	}
	start := s.logits + uint64(row)*uint64(s.stride)*4
	r := sampleRow{logits: unsafe.Slice(testgpu.At[float32](start, 0), int(s.vocab))}
	// Parts begin at multiples of 16 bytes.
	skip := int(start / 4 % 4)
	groups := attn.Ceil(skip+len(r.logits), 4)
	each := attn.Ceil(groups, s.warps)
	for w := range s.warps {
		from := min(w*each, groups)
		to := min(from+each, groups)
		logit := func(group int) int { return min(max(group*4-skip, 0), len(r.logits)) }
		r.parts = append(r.parts, [2]int{logit(from), logit(to)})
	}
	for i := range r.board {
		r.board[i] = make([]uint64, s.warps)
	}

	best, top, least := int32(-1), uint32(noKey), uint32(math.MaxUint32)
	for _, part := range r.parts {
		most := uint32(noKey)
		for i := part[0]; i < part[1]; i++ {
			key := keyOf(r.logits[i])
			if key > top {
				best, top = int32(i), key
			}
			most = max(most, key)
		}
		least = min(least, most)
	}
	if top == noKey || top >= infiniteKey {
		return -1
	}
	if set.Temperature == 0 {
		return best
	}
	r.top, r.perT = float64(logitOf(top)), min(1<<32*math.Log2E/set.Temperature, 1e300)

	var cut sampleCut
	cut.key = noKey
	if k := int(set.TopK); k > 0 && k < len(r.logits) {
		if k > s.warps {
			least = noKey
		}
		key, above := r.bisect(false, least, top+1, uint64(k))
		cut = sampleCut{key: key, ties: uint64(k) - above}
		if cut.ties > 0 && key > noKey {
			cut.weight = r.weight(logitOf(key))
		}
	}
	total := r.addUp(&cut)
	if set.TopP < 1 {
		target := min(max(roundUp(set.TopP*float64(total)), 1), total)
		key, above := r.bisect(true, cut.key, top+1, target)
		cut = sampleCut{key: key}
		if above < target {
			cut.weight = r.weight(logitOf(key))
			cut.ties = (target - above + cut.weight - 1) / cut.weight
		}
		total = r.addUp(&cut)
	}

	target := total - 1
	if x := u * float64(total); x < float64(target) {
		target = uint64(max(x, 0))
	}
	var above, ties uint64
	for i, x := range r.logits {
		switch key := keyOf(x); {
		case key > cut.key:
			above += r.weight(x)
		case key == cut.key:
			ties++
		}
		if target < cut.kept(above, ties) {
			return int32(i)
		}
	}
	return -2 // which no kernel gives
}

func roundUp(x float64) uint64 {
	if !(x > 0) {
		return 0
	}
	return uint64(math.Ceil(x))
}

func (r *sampleRow) weight(x float32) uint64 {
	y := math.RoundToEven((float64(x) - r.top) * r.perT)
	if !(y > -45<<32) {
		return 0
	}
	t := int64(y)
	f := uint64(uint32(t))
	power := uint64(0x15bd3)
	for _, c := range []uint64{0x99317, 0x57bf1a, 0x2763464, 0xe3589f8, 0x3d7f7ba6, 0xb17217f9, 0} {
		power = power*f>>32 + c
	}
	return (oneWeight | power<<12) >> -(t >> 32)
}

// sampleCut is struct Cut.
type sampleCut struct {
	key          uint32
	ties, weight uint64
}

func (c *sampleCut) kept(above, n uint64) uint64 { return above + min(n, c.ties)*c.weight }

// told is the sum of what all warps told as number i.
func (r *sampleRow) told(i int) (sum uint64) {
	for _, x := range r.board[i] {
		sum += x
	}
	return sum
}

// addUp is what can be chosen with a cut.
func (r *sampleRow) addUp(c *sampleCut) uint64 {
	for w, part := range r.parts {
		var above, ties uint64
		for _, x := range r.logits[part[0]:part[1]] {
			switch key := keyOf(x); {
			case key > c.key:
				above += r.weight(x)
			case key == c.key:
				ties++
			}
		}
		r.board[0][w], r.board[1][w] = above, ties
	}
	return c.kept(r.told(0), r.told(1))
}

func (r *sampleRow) bisect(weights bool, lo, hi uint32, target uint64) (key uint32, above uint64) {
	for hi-lo > 1 {
		width := hi - lo
		step := (width + 3) / 4
		for w, part := range r.parts {
			var sums [3]uint64
			for _, x := range r.logits[part[0]:part[1]] {
				d := keyOf(x) - lo
				if d >= width || d < step {
					continue
				}
				worth := uint64(1)
				if weights {
					worth = r.weight(x)
				}
				for i := range min(d/step, 3) {
					sums[i] += worth
				}
			}
			for i, sum := range sums {
				r.board[i][w] = sum
			}
		}
		start, greater := lo, above
		for i := 2; i >= 0 && lo == start; i-- {
			key := start + uint32(i+1)*step
			sum := greater + r.told(i)
			if sum == target {
				return key - 1, sum
			}
			if sum > target {
				lo = key
			} else {
				hi, above = min(hi, key), sum
			}
		}
	}
	return lo, above
}
