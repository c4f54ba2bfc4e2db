package decoder

import (
	"sync"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
)

// sampleUnit is the module with the kernels that choose tokens. It is loaded with
// the first Sampler.
const sampleUnit = "sample"

// MostVocab is the most tokens that a Sampler chooses from: more of them would
// add up to more than its sums hold.
const MostVocab = 1 << 19

// mostSampleRows keeps the number of thread blocks within what a launch takes.
const mostSampleRows = 1 << 24

// Setting says how a row's token is chosen from logits x:
//
//	p[i] = exp(x[i]/Temperature) / sum over j in K of exp(x[j]/Temperature)
//
// for the tokens i in K, and p[i] = 0 for the others. K is everything, then the
// TopK most likely of it, then the smallest set of most likely tokens whose
// probabilities (among those that TopK left) add up to TopP or more. Of equally
// likely tokens the lower id comes first. The token is the first whose sum of
// probabilities, in the order of ids, is greater than the row's random number.
//
// Probabilities are right to 1e-9 of themselves; one of less than 2^-44 of the
// greatest is 0. No value of a setting is an error, since only the GPU reads it.
type Setting struct {
	// Temperature 0 is greedy: the most likely token, and of equals the lowest
	// id. A row of a negative one, or NaN, is nobody's: its token is -1.
	Temperature float64
	TopP        float64 // in (0, 1); 1 or more: all tokens
	TopK        int32   // 0 or less: all tokens
	_           int32
}

// SettingSize is the bytes of a Setting in the memory of a GPU.
const SettingSize = 24

// SettingBytes is the memory of settings, which is what the GPU reads.
func SettingBytes(s []Setting) []byte { return gpu.BytesOf(s) }

// Samples are rows of logits, and what is chosen from each. Whatever is in the
// memory may change between the launches of a captured graph.
type Samples struct {
	Logits gpu.Memory // float32
	Rows   int
	Vocab  int // tokens of a row
	Stride int // elements from a row to the next

	// Settings is a Setting for each row. Without a buffer all rows are greedy,
	// which takes less time than settings that say so.
	Settings gpu.Bytes
	Random   gpu.Bytes // a float64 in [0, 1) for each row; not read where all rows are greedy

	// IDs is an int32 for each row: the token, or -1 where none is the most
	// likely, since one is NaN or +Inf, or all are -Inf. A token of -Inf is never
	// chosen.
	IDs gpu.Bytes
}

// sampleParams is struct SampleParams (kernels/sample_tokens.cuh).
type sampleParams struct {
	logits, settings, random, ids uint64
	stride                        int64
	vocab                         int32
	_                             [4]byte
}

// Sampler chooses tokens on a GPU. The same logits, settings and random numbers
// give the same tokens, whatever else there is in the other rows. It may be used
// by several goroutines at once.
type Sampler struct {
	info           cuda.Info
	greedy, random *cuda.Function

	mu     sync.Mutex
	args   cuda.Args
	params sampleParams
}

// NewSampler makes a sampler; the first of a device loads the kernels. It holds
// nothing that would have to be given back.
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

// check reports what is wrong with o.
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

// Run queues the choice of a token for each row: one launch, which may be
// captured. Nothing is queued where there is an error, or no row.
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

// sampleTeam is the thread blocks of a row from 9.0 on: the most that every GPU
// has in a cluster.
const sampleTeam = 8

// sampleGrid is a team of thread blocks for each row, of a size that many rows
// have theirs at once. Before 9.0 one block of all threads has a row for itself.
func sampleGrid(info *cuda.Info, rows int, greedy bool) cuda.Grid {
	if info.Capability < 90 {
		return cuda.Grid{Blocks: [3]int{rows}, Threads: [3]int{1024}}
	}
	threads := 256
	if greedy { // which needs fewer registers
		threads = 512
	}
	return cuda.Grid{Blocks: [3]int{rows * sampleTeam}, Threads: [3]int{threads}, Cluster: [3]int{sampleTeam}, Overlap: true}
}
