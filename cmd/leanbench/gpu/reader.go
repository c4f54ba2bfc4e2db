package gpu

import (
	"errors"
	"fmt"
	"unsafe"

	"gorgonia.org/leanattention/internal/cuda"
)

// pageSeq, pageRange and pagesParams are what read_pages takes: kernels/ceiling.cu says
// what they mean.
type pageSeq struct {
	first, pages int32
}

type pageRange struct {
	seq, head, page, pieces int32
	first                   pageSeq
}

type pagesParams struct {
	keys, values                  uint64
	table, seqs, ranges, sink     uint64
	pageBytes                     int64
	piece, heads, together, slots int32
}

const (
	readerWarps = 4 // of a thread block: keys and values of two ranges
	readerSlot  = 8 << 10
	readerRing  = 32 << 10 // of a warp
)

// pageReader reads the keys and values of a problem in pages, and does nothing else.
type pageReader struct {
	d        *gpuDevice
	p        *gpuProblem
	function *cuda.Function
	grid     cuda.Grid
	params   pagesParams
	memory   []*cuda.Buffer // of the lists
	args     cuda.Args
}

func (d *gpuDevice) newPageReader(p *gpuProblem) (r *pageReader, err error) {
	module, err := d.ceilingModule()
	if err != nil {
		return nil, err
	}
	g, blocks := &p.geometry, d.dev.Info().Multiprocessors
	piece := 2 * g.Pages.Planes[0].At.Head
	together := max(1, readerSlot/piece)
	slots := readerRing / (together * piece)
	shared := readerWarps * slots * together * piece
	r = &pageReader{
		d: d, p: p, grid: cuda.Grid{Blocks: [3]int{blocks}, Threads: [3]int{readerWarps * 32}, Shared: shared},
		params: pagesParams{
			sink: d.sink.Address(), pageBytes: int64(2 * g.Pages.Planes[0].At.Page), piece: int32(piece), heads: int32(g.KVHeads),
			together: int32(together), slots: int32(slots),
		},
	}
	defer func() {
		if err != nil {
			r, err = nil, errors.Join(err, r.close())
		}
	}()
	if r.function, err = module.Function("read_pages"); err != nil {
		return r, err
	}
	if err := r.function.SetDynamicShared(shared); err != nil {
		return r, err
	}
	table, seqs, ranges := p.pageLists(2 * blocks)
	if r.params.table, err = addressOf(r, table); err != nil {
		return r, err
	}
	if r.params.seqs, err = addressOf(r, seqs); err != nil {
		return r, err
	}
	r.params.ranges, err = addressOf(r, ranges)
	return r, err
}

// addressOf is where on the GPU a list is then.
func addressOf[T any](r *pageReader, list []T) (uint64, error) {
	bytes := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(list))), len(list)*int(unsafe.Sizeof(list[0])))
	b, err := r.d.dev.NewBuffer(int64(len(bytes)))
	if err != nil {
		return 0, err
	}
	r.memory = append(r.memory, b)
	return b.Address(), b.Upload(0, bytes)
}

func (r *pageReader) close() (err error) {
	for _, b := range r.memory {
		err = errors.Join(err, b.Close())
	}
	return err
}

// pieces is the length of the list sequence -> KV head -> page.
func (p *gpuProblem) pieces() (n int) {
	for i := range p.seqs {
		n += p.kvHeads * len(p.seqs[i].Pages)
	}
	return n
}

// pageLists are the block table, the sequences, and equal ranges of the list of pieces.
func (p *gpuProblem) pageLists(n int) (table []int32, seqs []pageSeq, ranges []pageRange) {
	for i := range p.seqs {
		pages := p.seqs[i].Pages
		seqs = append(seqs, pageSeq{int32(len(table)), int32(len(pages))})
		table = append(table, pages...)
	}
	seq, before, all := 0, 0, p.pieces()
	for i := range n {
		begin, end := all*i/n, all*(i+1)/n
		for begin-before >= p.kvHeads*int(seqs[seq].pages) {
			before += p.kvHeads * int(seqs[seq].pages)
			seq++
		}
		pages := int(seqs[seq].pages)
		head, page := (begin-before)/pages, (begin-before)%pages
		ranges = append(ranges, pageRange{int32(seq), int32(head), int32(page), int32(end - begin), seqs[seq]})
	}
	return table, seqs, ranges
}

func (r *pageReader) launch(i int) error {
	params := r.params
	params.keys = r.d.keys.Address() + uint64(r.d.set(r.p.Shape, i))
	params.values = params.keys + uint64(2*r.p.elements)
	r.args.Reset()
	cuda.Struct(&r.args, &params)
	for _, b := range r.memory {
		r.args.Hold(b)
	}
	r.args.Hold(r.d.keys)
	r.args.Hold(r.d.sink)
	return r.function.Launch(r.d.stream, r.grid, &r.args)
}

// verify compares what a warp has read in launch i, the last one, with the host's memory.
func (r *pageReader) verify(i, warp int) error {
	var got [32]uint32
	if err := r.d.sink.Download(unsafe.Slice((*byte)(unsafe.Pointer(&got)), unsafe.Sizeof(got)), int64(warp)*int64(unsafe.Sizeof(got))); err != nil {
		return err
	}
	sum := uint32(0)
	for _, x := range got {
		sum += x
	}
	if want := r.sum(i, warp); sum != want {
		return fmt.Errorf("the words that warp %d has read add up to %#x; it should be %#x", warp, sum, want)
	}
	return nil
}

// sum is that of the words that a warp adds up, found without the lists that the GPU has.
func (r *pageReader) sum(launch, warp int) (sum uint32) {
	p, g := r.p, &r.p.geometry
	begin := r.d.set(p.Shape, launch)/2 + int64(warp%2)*p.elements
	part, parts, all := warp/2, 2*r.grid.Blocks[0], p.pieces()
	first, end, i := all*part/parts, all*(part+1)/parts, 0
	for _, s := range p.seqs {
		for head := range g.KVHeads {
			for _, page := range s.Pages {
				if i >= first && i < end {
					at := begin + int64(page)*int64(g.Pages.Planes[0].At.Page) + int64(head*g.Pages.Planes[0].At.Head)
					for j := 0; j < g.Pages.Planes[0].At.Head; j += int(r.params.together) * g.Pages.Planes[0].At.Head / 32 {
						x := r.d.row(at+int64(j), 2)
						sum += uint32(x[0]) | uint32(x[1])<<16
					}
				}
				i++
			}
		}
	}
	return sum
}

// reader is a contender that reads the pages that attention does. There is none before
// compute capability 9.0. What it has read is compared before anything is timed.
func (d *gpuDevice) reader(name string, p *gpuProblem) (*Contender, error) {
	if d.dev.Info().Capability < 90 {
		return nil, nil
	}
	r, err := d.newPageReader(p)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	c, err := d.contender(name, p.Launches(), r.launch, r.close)
	if err != nil {
		return nil, errors.Join(err, r.close())
	}
	if d.unchecked {
		return c, nil
	}
	if _, err = c.Replay(1); err == nil {
		err = r.verify(p.Launches()-1, d.rng.IntN(readerWarps*r.grid.Blocks[0]))
	}
	if err != nil {
		err = fmt.Errorf("%s: %w", name, err)
	}
	return c, err
}
