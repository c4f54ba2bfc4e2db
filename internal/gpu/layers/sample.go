package layers

import (
	"sync"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
)

// sampleUnit is the module with the kernels that choose tokens, loaded with the first Sampler.
const sampleUnit = "sample"

// MostVocab is the largest vocabulary of a Sampler: more tokens would overflow its sums.
const MostVocab = 1 << 19

// mostSampleRows keeps the number of thread blocks within a launch's limit.
const mostSampleRows = 1 << 24

// Setting says how a row's token is chosen from logits x:
//
//	p[i] = exp(x[i]/Temperature) / sum over j in K of exp(x[j]/Temperature)
//
// for the tokens i in K, and p[i] = 0 for other tokens. K is all tokens, then the TopK most likely, then the smallest
// set of most likely tokens whose probabilities, after TopK, sum to TopP or more. Among equally likely tokens the
// lower id comes first. The token is the first, in the order of ids, at which the sum of probabilities exceeds the
// row's random number.
//
// Probabilities have a relative error of 1e-9; one of less than 2^-44 of the greatest is 0. No value of a setting is
// an error, since only the GPU reads the setting.
type Setting struct {
	// Temperature 0 is greedy: the most likely token, and among equals the lowest id. A row with a negative
	// temperature, or NaN, is unassigned: its token is -1.
	Temperature float64
	TopP        float64 // in (0, 1); 1 or more: all tokens
	TopK        int32   // 0 or less: all tokens
	_           int32
}

// SettingSize is the number of bytes of a Setting in the memory of a GPU.
const SettingSize = 24

// SettingBytes returns the memory of settings, as the GPU reads it.
func SettingBytes(s []Setting) []byte { return gpu.BytesOf(s) }

// Samples is rows of logits and the results. The memory's contents may change between the launches of a captured
// graph.
type Samples struct {
	Logits gpu.Memory // float32
	Rows   int
	Vocab  int // tokens of a row
	Stride int // elements between the beginnings of two rows

	// Settings has a Setting for each row. Without a buffer all rows are greedy, which is faster than greedy
	// settings.
	Settings gpu.Bytes
	Random   gpu.Bytes // a float64 in [0, 1) for each row; not read if all rows are greedy

	// IDs gets an int32 for each row: the token, or -1 if there is no most likely token, since a logit is NaN or
	// +Inf, or all are -Inf. A token of -Inf is never chosen.
	IDs gpu.Bytes
}

// sampleParams is struct SampleParams (kernels/sample_tokens.cuh).
type sampleParams struct {
	logits, settings, random, ids uint64
	stride                        int64
	vocab                         int32
	_                             [4]byte
}

// Sampler chooses tokens on a GPU. Equal logits, settings and random numbers give equal tokens, for any other rows. A
// Sampler may be used by several goroutines at once.
type Sampler struct {
	info           cuda.Info
	greedy, random *cuda.Function

	mu     sync.Mutex
	args   cuda.Args
	params sampleParams
}

// NewSampler makes a sampler; the first sampler of a device loads the kernels. A sampler needs no Close.
func NewSampler(dev *cuda.Device) (*Sampler, error) {
	s := &Sampler{info: dev.Info()}
	m, err := gpu.Module(dev, sampleUnit)
	if err != nil {
		return nil, err
	}
	if s.greedy, err = m.Function("sample_greedy"); err != nil {
		return nil, err
	}
	if s.random, err = m.Function("sample_random"); err != nil {
		return nil, err
	}
	return s, nil
}

// check returns the error of invalid operands.
func (o *Samples) check(op string) error {
	switch {
	case o.Rows < 0 || o.Rows > mostSampleRows:
		return gpu.Errorf(op, attn.ErrShape, "%d rows; there are kernels for %d", o.Rows, mostSampleRows)
	case o.Vocab < 1 || o.Vocab > MostVocab:
		return gpu.Errorf(op, attn.ErrShape, "a vocabulary of %d; there are kernels for %d", o.Vocab, MostVocab)
	case o.Stride < o.Vocab:
		return gpu.Errorf(op, attn.ErrShape, "rows of %d logits are %d apart", o.Vocab, o.Stride)
	}
	if o.Rows == 0 {
		return nil
	}
	if err := o.Logits.Check(op, "the logits", attn.Strides{Row: o.Stride}.Extent(o.Rows, 1, o.Vocab)); err != nil {
		return err
	}
	if o.Logits.DType != attn.Float32 {
		return gpu.Errorf(op, attn.ErrDType, "the logits are %v", o.Logits.DType)
	}
	if err := o.IDs.Check(op, "the ids", o.Rows, 4); err != nil {
		return err
	}
	if o.Settings.Buffer == nil {
		return nil
	}
	if err := o.Settings.Check(op, "the settings", o.Rows, SettingSize); err != nil {
		return err
	}
	return o.Random.Check(op, "the random numbers", o.Rows, 8)
}

// Run queues the choice of a token for each row: one launch, which may be captured. After an error, and without rows,
// nothing is queued.
func (s *Sampler) Run(stream *cuda.Stream, o *Samples) error {
	const op = "sample"
	if err := o.check(op); err != nil || o.Rows == 0 {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.params = sampleParams{logits: o.Logits.Address(), ids: o.IDs.Address(), stride: int64(o.Stride), vocab: int32(o.Vocab)}
	kernel, greedy := s.greedy, true
	if o.Settings.Buffer != nil {
		kernel, greedy = s.random, false
		s.params.settings, s.params.random = o.Settings.Address(), o.Random.Address()
	}
	s.args.Reset()
	cuda.Struct(&s.args, &s.params)
	for _, b := range [...]*cuda.Buffer{o.Logits.Buffer, o.IDs.Buffer, o.Settings.Buffer, o.Random.Buffer} {
		if b != nil {
			s.args.Hold(b)
		}
	}
	return kernel.Launch(stream, sampleGrid(&s.info, o.Rows, greedy), &s.args)
}

// sampleTeam is the number of thread blocks of a row from 9.0 on: the most that every GPU can have in a cluster.
const sampleTeam = 8

// sampleGrid returns a launch with a team of thread blocks for each row. The team's size lets many rows run at once.
// Before 9.0 one block of all threads has a row.
func sampleGrid(info *cuda.Info, rows int, greedy bool) cuda.Grid {
	if info.Capability < 90 {
		return cuda.Grid{Blocks: [3]int{rows}, Threads: [3]int{1024}}
	}
	threads := 256
	if greedy { // greedy needs fewer registers
		threads = 512
	}
	return cuda.Grid{Blocks: [3]int{rows * sampleTeam}, Threads: [3]int{threads}, Cluster: [3]int{sampleTeam}, Overlap: true}
}
