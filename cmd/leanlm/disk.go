package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"syscall"
)

// disk is the file operations of a prompt cache.
type disk interface {
	Stat(name string) (fs.FileInfo, error)
	Lstat(name string) (fs.FileInfo, error)
	Readlink(name string) (string, error)
	Open(name string) (file, error) // opens a file for reading, or a folder for Sync
	CreateTemp(folder, pattern string) (file, error)
	Rename(from, to string) error
	Remove(name string) error
}

type file interface {
	io.ReadWriteCloser
	Name() string
	Sync() error
}

// drive is the system's files; tests make each operation fail.
var drive disk = osDisk{}

type osDisk struct{}

func (osDisk) Stat(name string) (fs.FileInfo, error)           { return os.Stat(name) }
func (osDisk) Lstat(name string) (fs.FileInfo, error)          { return os.Lstat(name) }
func (osDisk) Readlink(name string) (string, error)            { return os.Readlink(name) }
func (osDisk) Open(name string) (file, error)                  { return os.Open(name) }
func (osDisk) CreateTemp(folder, pattern string) (file, error) { return os.CreateTemp(folder, pattern) }
func (osDisk) Rename(from, to string) error                    { return os.Rename(from, to) }
func (osDisk) Remove(name string) error                        { return os.Remove(name) }

// folderOf returns the folder of a file. It does not clean paths with "..", which after a link to a folder is not the
// parent in the path.
func folderOf(name string) string {
	if folder, _ := filepath.Split(name); folder != "" {
		return folder
	}
	return "."
}

// linked returns the name of the file that a link leads to, which need not exist; the name itself if it is no link.
func linked(name string) (string, error) {
	const mostLinks = 40 // as in Linux
	for range mostLinks {
		info, err := drive.Lstat(name)
		if errors.Is(err, fs.ErrNotExist) || err == nil && info.Mode()&fs.ModeSymlink == 0 {
			return name, nil
		}
		if err != nil {
			return "", err
		}
		to, err := drive.Readlink(name)
		if err != nil {
			return "", err
		}
		if !filepath.IsAbs(to) {
			folder, _ := filepath.Split(name)
			to = folder + to
		}
		name = to
	}
	return "", fmt.Errorf("more than %d links, the last of them to %q", mostLinks, name)
}

// writeAtomically makes or replaces a file; name is no link. write writes a file beside it, which is then renamed. An
// error before that leaves the earlier file. An error after that is one of syncing the folder: the file is the new
// one, and a crash of the system may restore the earlier one.
func writeAtomically(name string, write func(io.Writer) error) (err error) {
	folder := folderOf(name)
	sync, err := folderSync(folder)
	if err != nil {
		return err
	}
	f, err := drive.CreateTemp(folder, ".leanlm-*")
	if err != nil {
		return errors.Join(err, sync(false))
	}
	w := bufio.NewWriterSize(f, 1<<20)
	err = write(w)
	if err == nil {
		err = w.Flush()
	}
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = drive.Rename(f.Name(), name)
	}
	if err != nil {
		return errors.Join(err, drive.Remove(f.Name()), sync(false))
	}
	return sync(true)
}

// folderSync opens a folder, and returns a function that closes it. If the argument is set, the function first syncs
// the folder: otherwise a renamed file may have its earlier name after a crash. Windows and some file systems have no
// such call, and a folder need not be readable: then the function does nothing.
func folderSync(folder string) (func(bool) error, error) {
	none := func(bool) error { return nil }
	if !folderSyncs {
		return none, nil
	}
	f, err := drive.Open(folder)
	if errors.Is(err, fs.ErrPermission) {
		return none, nil
	}
	if err != nil {
		return nil, err
	}
	return func(renamed bool) (err error) {
		if renamed {
			if err = f.Sync(); errors.Is(err, errors.ErrUnsupported) || errors.Is(err, syscall.EINVAL) {
				err = nil
			}
		}
		return errors.Join(err, f.Close())
	}, nil
}

const folderSyncs = runtime.GOOS != "windows" && runtime.GOOS != "plan9" && runtime.GOOS != "js"
