package gguf

import (
	"bytes"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
)

// The metadata keys in each file of a split model. The files' names end with -00001-of-00003.gguf.
const (
	keyPart    = "split.no"            // index of this file, from 0
	keyParts   = "split.count"         // number of files; 0 and 1: the model is not split
	keyTensors = "split.tensors.count" // number of tensors in all files
)

// assemble opens the remaining files of a model, and returns the File. If there is an error, assemble closes all files.
func assemble(first *part, u *use) (*File, error) {
	f := &File{meta: first.meta, use: u, parts: []*part{first}, byName: map[string]*Tensor{}}
	if err := f.assemble(); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

func (f *File) assemble() error {
	first := f.parts[0]
	n, err := Or(first.meta.Int, keyParts, 1)
	if err != nil {
		return err
	}
	if n > 1 {
		if err := f.openParts(n); err != nil {
			return err
		}
	}
	for _, p := range f.parts {
		for _, t := range p.tensors {
			if f.byName[t.name] != nil {
				return fail(ErrFormat, p.path, "tensor %s is there twice", quote(t.name))
			}
			f.byName[t.name] = t
			f.tensors = append(f.tensors, t)
		}
	}
	total, err := Or(first.meta.Int, keyTensors, len(f.tensors))
	if err != nil {
		return err
	}
	// A file that was merged from parts says that it has 0 parts, and keeps the key for the number of tensors.
	if n > 1 && total != len(f.tensors) {
		return fail(ErrFormat, first.path, "%s is %d, and the %d files have %d tensors", keyTensors, total, n, len(f.tensors))
	}
	_, err = Or(first.meta.Int, keyPart, 0)
	return err
}

// openParts opens files 2 to n, and checks the metadata of each.
func (f *File) openParts(n int) error {
	first := f.parts[0]
	no, err := first.meta.Int(keyPart)
	if err != nil {
		return err
	}
	if n > 99999 {
		return fail(ErrFormat, first.path, "%s is %d; names of files have 5 digits", keyParts, n)
	}
	if no < 0 || no >= n {
		return fail(ErrFormat, first.path, "%s is %d of %d files", keyPart, no, n)
	}
	dir, name := filepath.Split(first.path)
	base, ok := strings.CutSuffix(name, fmt.Sprintf("-%05d-of-%05d.gguf", no+1, n))
	if !ok {
		return fail(ErrFormat, first.path, "the file is part %d of %d, and its name does not end with -%05d-of-%05d.gguf", no+1, n, no+1, n)
	}
	path := func(i int) string { return filepath.Join(dir, fmt.Sprintf("%s-%05d-of-%05d.gguf", base, i+1, n)) }
	if no != 0 {
		return fail(ErrUnsupported, first.path, "the file is part %d of %d: open the first, %s", no+1, n, filepath.Base(path(0)))
	}
	if first.file == nil {
		return fail(ErrUnsupported, first.path, "the bytes in memory are part %d of %d: open the model by its path", no+1, n)
	}
	for i := 1; i < n; i++ {
		p, err := openPart(path(i), f.use)
		if err != nil {
			return fmt.Errorf("part %d of %d: %w", i+1, n, err)
		}
		f.parts = append(f.parts, p)
		if err := p.follows(first, i); err != nil {
			return err
		}
	}
	return nil
}

// follows checks that p is part i of the model whose first part is first.
func (p *part) follows(first *part, i int) error {
	no, err := p.meta.Int(keyPart)
	if err != nil {
		return err
	}
	if no != i {
		return fail(ErrFormat, p.path, "%s is %d; %d is wanted", keyPart, no, i)
	}
	if p.version != first.version {
		return fail(ErrFormat, p.path, "version %d, and the first part has %d", p.version, first.version)
	}
	err = p.meta.use.do(p.path, func() error {
		for _, key := range p.meta.keys {
			own, its := p.meta.values[key], first.meta.values[key]
			switch {
			case key == keyPart || key == alignmentKey:
			case its == nil:
				return fail(ErrUnsupported, p.path, "metadata key %s is not in the first part", quote(key))
			case own.kind != its.kind || own.elem != its.elem || own.n != its.n || !bytes.Equal(own.data, its.data):
				return fail(ErrFormat, p.path, "metadata key %s differs from the first part's", quote(key))
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	for _, key := range []string{keyParts, keyTensors} {
		if !p.meta.Has(key) && first.meta.Has(key) {
			return fail(ErrMissing, p.path, "metadata key %q", key)
		}
	}
	return nil
}
