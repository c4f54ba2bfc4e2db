package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"

	"gorgonia.org/leanattention/decoder"
)

// promptCache is the file of -prompt-cache: a text that Engine.Save has written. A run takes the tokens that begin its prompt from
// the file, and computes the others. If the file lacks a part of the prompt, the run writes the prompt to the file. A file that
// does not fit is an error, and stays as it is. If the name is a link, the target is written.
type promptCache struct {
	name   string // as given
	target string // the file: name, or the target of the link
	in     file   // nil: the file does not exist yet
	what   string // that prompt has the tokens of
	prompt []int  // of this run
	tokens []int  // of the file
}

// openPromptCache opens the file, if it exists. Close the result after use.
func openPromptCache(name, what string, prompt []int) (_ *promptCache, err error) {
	p := &promptCache{name: name, what: what, prompt: prompt}
	defer func() {
		if err != nil {
			err = p.fail(errors.Join(err, p.Close()))
		}
	}()
	if p.target, err = linked(p.name); err != nil {
		return nil, err
	}
	info, err := drive.Stat(p.target) // opening a pipe would block
	switch {
	case errors.Is(err, fs.ErrNotExist):
		folder, err := drive.Stat(folderOf(p.target))
		if err == nil && !folder.IsDir() {
			err = errors.New("its folder is no folder")
		}
		return p, err
	case err != nil:
		return nil, err
	case !info.Mode().IsRegular():
		return nil, errors.New("no regular file")
	}
	if p.in, err = drive.Open(p.target); err != nil {
		p.in = nil
		return nil, err
	}
	return p, nil
}

func (p *promptCache) fail(err error) error {
	if p.target != "" && p.target != p.name {
		return fmt.Errorf("-prompt-cache %s, a link to %q: %w", p.name, p.target, err)
	}
	return fmt.Errorf("-prompt-cache %s: %w", p.name, err)
}

// Close closes the file.
func (p *promptCache) Close() error {
	if p == nil || p.in == nil {
		return nil
	}
	f := p.in
	p.in = nil
	return f.Close()
}

// load reads the file into the engine.
func (p *promptCache) load(engine *decoder.Engine) (err error) {
	if p == nil || p.in == nil {
		return nil
	}
	from := bufio.NewReaderSize(p.in, 1<<20)
	if p.tokens, err = engine.Load(from); err == nil {
		switch _, err = from.ReadByte(); {
		case err == nil:
			err = errors.New("something follows the end of the saved text")
		case errors.Is(err, io.EOF):
			err = nil
		}
	}
	if err = errors.Join(err, p.Close()); err != nil {
		if errors.Is(err, decoder.ErrTooLong) {
			return p.fail(fmt.Errorf("%w: -c makes the context larger", err))
		}
		return p.fail(fmt.Errorf("%w: delete the file, or name another one", err))
	}
	return nil
}

// errPart reports that the engine has only a part of the prompt.
var errPart = errors.New("a part of the prompt")

// save writes the prompt to the file, if the file lacks a part of the prompt, and the engine has the whole prompt.
func (p *promptCache) save(ctx context.Context, engine *decoder.Engine, std streams) error {
	if p == nil {
		return nil
	}
	n := 0
	for n < min(len(p.prompt), len(p.tokens)) && p.prompt[n] == p.tokens[n] {
		n++
	}
	if n == len(p.prompt) {
		return nil
	}
	has := 0
	err := writeAtomically(p.target, func(w io.Writer) (err error) {
		if has, err = engine.Save(w, p.prompt); err == nil && has < len(p.prompt) {
			err = errPart
		}
		return err
	})
	switch {
	case errors.Is(err, errPart):
		if ctx.Err() == nil {
			fmt.Fprintf(std.err, "-prompt-cache %s: not written: %d of the %s's %d tokens are in the cache; -c and -cache-tokens make the cache larger\n", printable(p.name), has, p.what, len(p.prompt))
		}
		return nil
	case err != nil:
		return p.fail(err)
	}
	return nil
}
