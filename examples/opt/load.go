package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"gorgonia.org/leanattention/device"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/decoder/tokenizer"
	"gorgonia.org/leanattention/examples/opt/hf"
	"gorgonia.org/leanattention/examples/opt/model"
	"gorgonia.org/leanattention/examples/opt/tiny"
	"gorgonia.org/leanattention/internal/plural"
	"gorgonia.org/leanattention/ranks"
)

// loaded is a model: first its folder's contents, and later its decoder.
type loaded struct {
	options   options
	config    hf.Config
	folder    *hf.Folder
	tokenizer *tokenizer.Tokenizer
	gpu       *device.GPU    // nil: the CPU
	comm      *ranks.Comm    // the ranks; nil: one process
	exchange  model.Exchange // the measured exchange

	weights *model.Weights
	decoder *model.Decoder
	garbage func() // restores the collector's setting
	first   firstToken
}

// load opens a model's folder and the GPU. Close the result after use.
func load(o options, stderr io.Writer) (_ *loaded, err error) {
	fmt.Fprintf(stderr, "loading %s\n", name(o.model))
	began := time.Now()
	l := &loaded{options: o}
	defer func() {
		if err != nil {
			err = errors.Join(err, l.Close())
		}
	}()
	if l.folder, l.tokenizer, err = open(o.model); err != nil {
		return nil, explain(o.model, err)
	}
	l.config = l.folder.Config()
	if o.onGPU() {
		if err = l.openGPU(stderr); err != nil {
			return nil, err
		}
	}
	l.first.load = time.Since(began)
	return l, nil
}

// build loads the weights and makes a decoder. The flags of the computation are added to the options.
func (l *loaded) build(mo model.Options, stderr io.Writer) (err error) {
	began := time.Now()
	o, c := &l.options, l.config
	mo.Attention, mo.Schedule, mo.Linear, mo.Cache, mo.Workers, mo.Device = o.attention, o.schedule, o.linear, o.cache, o.workers, l.gpu
	mo.Shard, mo.Mixed, mo.Ranks = o.shard, o.mixed, l.comm
	if o.chunk > 0 {
		mo.Chunk = o.chunk
	}
	if err := model.CheckRoom(l.folder, o.weights, mo); err != nil {
		return err
	}
	if l.weights, err = model.LoadPart(l.folder, o.weights, o.world); err != nil {
		return err
	}
	l.first.load += time.Since(began)
	fmt.Fprintf(stderr, "loaded in %.2f s: %d layers of width %d, %d heads, %d positions, %d MB of weights\n",
		l.first.load.Seconds(), c.Layers, c.HiddenSize, c.Heads, c.MaxPositions, l.weights.Bytes()>>20)
	began = time.Now()
	if l.decoder, err = l.weights.NewDecoder(mo); err != nil {
		return err
	}
	l.first.build = time.Since(began)
	if l.garbage == nil && l.gpu == nil {
		l.garbage = model.LimitGarbage()
	}
	if l.gpu != nil {
		fmt.Fprintf(stderr, "on %v in %.2f s\n", l.gpu, l.first.build.Seconds())
	}
	return nil
}

// encode returns at most the given number of tokens of a text. The first text of a context gets the token that begins
// every text.
func (l *loaded) encode(text string, first bool, most int) ([]int, error) {
	if most == 0 {
		most = -1 // no room, and not no limit
	}
	return l.tokenizer.Encode(text, tokenizer.Options{Special: l.options.special, Bare: !first, AtMost: most})
}

// count returns the number of tokens of a text that is too long, up to a limit.
func (l *loaded) count(text string, first bool) string {
	most := 16 * l.config.MaxPositions
	ids, err := l.encode(text, first, most)
	if err != nil {
		return fmt.Sprintf("more than %d tokens", most)
	}
	return plural.Mend(fmt.Sprintf("%d tokens", len(ids)))
}

// hint returns a possible reason for logits that are NaN or infinite.
func (l *loaded) hint() string {
	if l.options.cache != la.Float16 {
		return ""
	}
	return "; the cache is float16, which has no numbers beyond 65504: -cache bf16 and -cache f32 have"
}

// device returns the name of the device that computes.
func (l *loaded) device() string {
	if l.gpu == nil {
		return "cpu"
	}
	return l.gpu.String()
}

// openGPU opens the GPU, or several, and joins the other ranks. Among ranks the environment says which GPU -device
// gpu is.
func (l *loaded) openGPU(stderr io.Writer) (err error) {
	o := &l.options
	if o.world.Size > 1 && o.anyGPU {
		l.gpu, err = o.world.OpenGPU()
	} else {
		l.gpu, err = device.Open(o.gpus...)
	}
	if err != nil || o.world.Size <= 1 {
		return err
	}
	same, err := l.same()
	if err != nil {
		return err
	}
	fmt.Fprintf(stderr, "waiting for %d ranks at %s\n", o.world.Size, o.world.Address)
	if l.comm, err = ranks.Join(context.Background(), l.gpu, o.world, same...); err != nil {
		return err
	}
	fmt.Fprintf(stderr, "rank %d of %d on %v\n", o.world.Rank, o.world.Size, l.gpu)
	return nil
}

// end is Close after err, which may be nil and which the other ranks are told.
func (l *loaded) end(err error) error {
	if l.comm != nil && err != nil {
		l.comm.Fail(err)
	}
	return errors.Join(err, l.Close())
}

// Close frees all resources. Ranks wait for each other in Close.
func (l *loaded) Close() (err error) {
	if l.garbage != nil {
		l.garbage()
		l.garbage = nil
	}
	if l.decoder != nil {
		err = errors.Join(err, l.decoder.Close())
	}
	if l.comm != nil {
		err = errors.Join(err, l.comm.Close())
	}
	if l.gpu != nil {
		err = errors.Join(err, l.gpu.Close())
	}
	if l.folder != nil {
		err = errors.Join(err, l.folder.Close())
	}
	return err
}

// open opens the folder of a model, or the shipped model if dir is empty.
func open(dir string) (folder *hf.Folder, tokens *tokenizer.Tokenizer, err error) {
	if dir != "" {
		folder, err = hf.Open(dir)
	} else {
		folder, err = hf.OpenFS(name(dir), tiny.Files)
	}
	if err != nil {
		return nil, nil, err
	}
	if dir != "" {
		tokens, err = tokenizer.Load(dir)
	} else {
		tokens, err = tokenizer.LoadFS(name(dir), tiny.Files)
	}
	if err != nil {
		return nil, nil, errors.Join(err, folder.Close())
	}
	return folder, tokens, nil
}

func name(dir string) string {
	if dir == "" {
		return "the shipped model"
	}
	return dir
}
