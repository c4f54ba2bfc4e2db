package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// explain adds to the error of opening the value of -m what the value is, and what to do instead.
func explain(name string, err error) error {
	info, e := os.Stat(name)
	switch {
	case errors.Is(e, fs.ErrNotExist) && hubName.MatchString(name):
		return fmt.Errorf("%w: if -m %s is the name of a model at huggingface.co: nothing is downloaded from there. Put the files of https://huggingface.co/%s into a folder, and give that folder to -m", err, name, name)
	case e != nil:
		return err
	case info.IsDir():
		return otherFolder(name, err)
	case !info.Mode().IsRegular():
		return fmt.Errorf("%w: -m takes a GGUF file or a folder", err)
	}
	if kind := fileKind(name); kind != "" {
		return fmt.Errorf("%w: %s, and -m takes a GGUF file, or a folder that has config.json, the weights and the tokenizer%s", err, kind, folderOfModel(name))
	}
	return err
}

// hubName matches names of models at huggingface.co.
var hubName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9][A-Za-z0-9_.-]*$`)

// fileKind returns the kind of a file that is no GGUF file; "": a GGUF file.
func fileKind(name string) string {
	begin := make([]byte, 4)
	if f, err := os.Open(name); err == nil {
		n, _ := io.ReadFull(f, begin)
		begin = begin[:n]
		f.Close()
	}
	switch ext := strings.ToLower(filepath.Ext(name)); {
	case bytes.Equal(begin, []byte("GGUF")):
		return ""
	case ext == ".safetensors", ext == ".bin", ext == ".pt", ext == ".pth":
		return "the file has weights alone"
	case ext == ".json":
		return "the file is a JSON file"
	}
	return "the file is something else"
}

// folderOfModel returns the way out for a file of a model's folder.
func folderOfModel(name string) string {
	folder := filepath.Dir(name)
	if info, err := os.Stat(filepath.Join(folder, "config.json")); err == nil && info.Mode().IsRegular() {
		return ": here that is -m " + folder
	}
	return ""
}

// otherFolder adds to an error what a folder without config.json has.
func otherFolder(folder string, err error) error {
	if _, e := os.Stat(filepath.Join(folder, "config.json")); !errors.Is(e, fs.ErrNotExist) {
		return err
	}
	find := func(pattern ...string) []string {
		found, _ := filepath.Glob(filepath.Join(append([]string{globbed(folder)}, pattern...)...))
		return found
	}
	if snapshots := find("snapshots", "*", "config.json"); len(snapshots) > 0 {
		return fmt.Errorf("%w: the folder is one of the hub's cache, and the model is at -m %s", err, filepath.Dir(snapshots[len(snapshots)-1]))
	}
	if models := find("*", "config.json"); len(models) > 0 {
		return fmt.Errorf("%w: the folder has folders of models: try -m %s", err, filepath.Dir(models[0]))
	}
	if files := find("*.gguf"); len(files) > 0 {
		return fmt.Errorf("%w: the folder has a GGUF file: try -m %s", err, files[0])
	}
	return err
}

// globbed returns a path as a part of a pattern.
func globbed(path string) string {
	if filepath.Separator == '\\' { // a pattern cannot escape these characters there
		return path
	}
	return regexp.MustCompile(`[*?\[\\]`).ReplaceAllString(path, `\$0`)
}
